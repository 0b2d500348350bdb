"""Servers of completions over HTTP: any number of replicas of one model, and who asks which.

All requests of one answer go to the same replica, whose prefix cache then knows what they share;
a new answer goes to the one that has the fewest. Nothing else is kept of anybody.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import httpx2 as httpx

from pasta_decoding.answer.guided import GuidedParams, GuideKind
from pasta_decoding.answer.record import ServerUsage
from pasta_decoding.errors import excerpt
from pasta_decoding.remote.stream import BAN, Completion, CompletionReader, RemoteError, checked_key

MAX_REQUESTS = 256
"""Under way at a time, all replicas together; more wait."""
MAX_RETRY_AFTER_S = 30.0
"""The longest that a server's Retry-After is obeyed."""

_HEALTHY = frozenset({400, 413, 422, 429})
"""These say nothing against a server: the request does not fit, or there are too many."""


@dataclass(frozen=True, slots=True)
class Service:
    """All that is needed to ask for completions.

    base_urls:     what stands before `/completions`, one a replica.
    model:         its name at the servers.
    max_positions: tokens of prompt and completion together.
    api_key:       never shown.
    connect_s:     limit on being reached,
    first_token_s: on the time from a request to its first token: its queue and its prefill,
    token_s:       and on that from one token to the next.
    retries:       of a request that has not brought a token, after the first try.
    pause_s:       before the first retry, twice as long before each further one.
    cooldown_s:    for how long a replica that has failed gets no new answers.
    """

    base_urls: tuple[str, ...]
    model: str
    vocabulary_size: int
    max_positions: int
    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 10.0
    first_token_s: float = 120.0
    token_s: float = 60.0
    retries: int = 4
    pause_s: float = 0.25
    cooldown_s: float = 10.0


@dataclass(slots=True, eq=False)
class Replica:
    """One server. `guided`: whether it has the logits processor; None as long as nobody asked."""

    base_url: str
    answers: int = 0
    cooldown_until_s: float = 0.0
    guided: bool | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Lease:
    """The place of one answer at one replica, and what it has asked for."""

    replica: Replica
    sent: ServerUsage = field(default_factory=ServerUsage)
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class ReplicaPool:
    """Connections to a service, all in one event loop, until it is closed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._replicas = [Replica(base_url) for base_url in service.base_urls]
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._client = httpx.AsyncClient(
            headers=headers(service.api_key),
            # The turns are its limit: waiting for one is not the server's time.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_REQUESTS),
            # Only connecting is limited here: each piece of a stream has its own time below.
            timeout=httpx.Timeout(None, connect=service.connect_s),
        )
        self.aclose = self._client.aclose

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Hold a place for one answer where there are fewest."""
        lease = Lease(self._least_busy())
        try:
            yield lease
        finally:
            lease.replica.answers -= 1

    async def stream(self, lease: Lease, asked: Completion) -> AsyncGenerator[int]:
        """Yield the ids of a completion as they come. Close it, and the server stops.

        Until the first one, what may pass by itself is tried again, at another replica unless this
        one is only busy. Raises RemoteError.
        """
        for tried in count():
            begun = False
            try:
                async with self._turns:
                    replica = lease.replica  # another request may move the lease meanwhile
                    guided = await self._is_guided(replica, asked)
                    lease.sent.requests += 1
                    reply = self._reply(replica, asked, lease, guided=guided)
                    async with aclosing(reply) as tokens:
                        async for token in tokens:
                            begun = True
                            yield token
                return
            except RemoteError as error:
                if not error.healthy:
                    self._leave(lease, replica)
                if begun or not error.retryable or tried >= self.service.retries:
                    tries = f" (tries: {tried + 1})" if tried else ""
                    about = f"the server at {replica.base_url} failed: {error}{tries}"
                    raise RemoteError(about, hint=error.hint, reason=error.reason) from error
                pause_s, after_s = self.service.pause_s * 2**tried, error.retry_after_s
                await asyncio.sleep(pause_s if after_s is None else min(after_s, MAX_RETRY_AFTER_S))

    def _least_busy(self) -> Replica:
        """Take a place at the replica with the fewest answers; if all cool down, at one of them."""
        now_s = asyncio.get_running_loop().time()
        ready = [one for one in self._replicas if one.cooldown_until_s <= now_s]
        chosen = min(ready or self._replicas, key=lambda one: (one.answers, one.cooldown_until_s))
        # The last one asked goes to the end, so that equals take turns.
        self._replicas.remove(chosen)
        self._replicas.append(chosen)
        chosen.answers += 1
        return chosen

    def _leave(self, lease: Lease, failed: Replica) -> None:
        """Let a replica cool down. Of an answer's requests the first to fail moves for all."""
        failed.guided = None  # who knows what will be there then?
        failed.cooldown_until_s = asyncio.get_running_loop().time() + self.service.cooldown_s
        if lease.replica is failed:
            failed.answers -= 1
            lease.replica = self._least_busy()

    async def _is_guided(self, replica: Replica, asked: Completion) -> bool:
        """Find out, once for a server, whether it obeys the params of requests."""
        if asked.params is None:
            return False
        async with replica.asking:
            if replica.guided is None:
                replica.guided = await self._has_processor(replica, asked, asked.params)
            return replica.guided

    async def _has_processor(
        self, replica: Replica, asked: Completion, params: GuidedParams
    ) -> bool:
        """Send a request whose reply only the processor can bring: all that it brings is banned.

        Raises RemoteError if the server has a processor that is of no use, or does not answer.
        """
        ids = range(self.service.vocabulary_size)
        verdicts = tuple(islice((token for token in ids if token not in params.ids), 4))
        check = replace(
            asked,
            prompt=asked.prompt[:1],
            max_tokens=2,
            stops=(),
            bias=dict.fromkeys(verdicts, BAN),
            params=replace(params, kind=GuideKind.check, verdicts=verdicts),
        )
        try:
            async with aclosing(self._reply(replica, check, Lease(replica), guided=True)) as tokens:
                found = [token async for token in tokens]
        except RemoteError as error:
            _, is_ours, said = error.reason.partition("pasta-decoding:")
            if is_ours:
                raise RemoteError(said.strip(), healthy=True) from error
            if error.retryable or not error.healthy:
                raise
            return False  # it refuses fields that it does not know
        well, seen, unseen, foreign = verdicts
        if found[:1] == [foreign]:
            about = "the model that it serves has not the reserved tokens that the answers need"
            raise RemoteError(f"{about}: serve what `pasta export --to hf` wrote", healthy=True)
        if found == [well, unseen]:
            raise RemoteError(
                "its logits processor is not shown the tokens that were written",
                hint="--logits-processors pasta_decoding.vllm.processor:PastaLogitsProcessor",
                healthy=True,
            )
        return found == [well, seen]

    async def _reply(
        self, replica: Replica, asked: Completion, lease: Lease, *, guided: bool
    ) -> AsyncGenerator[int]:
        reader = CompletionReader(asked, self.service.vocabulary_size)
        now_s = asyncio.get_running_loop().time
        began_s, limit_s = now_s(), self.service.first_token_s
        request = self._client.build_request(
            "POST",
            f"{replica.base_url}/completions",
            json=asked.body(self.service.model, guided=guided),
            headers={"X-Session-ID": lease.session},  # a router keeps an answer at one server
        )
        try:
            response = await _in_time(self._client.send(request, stream=True), began_s, limit_s)
            async with aclosing(response):
                if response.status_code != 200:
                    raise await _refusal(response, self.service)
                pieces = response.aiter_bytes()
                while (piece := await _in_time(anext(pieces, None), began_s, limit_s)) is not None:
                    received = reader.received
                    for token in reader.feed(piece):
                        yield token
                    if reader.received > received:
                        began_s, limit_s = now_s(), self.service.token_s
                last = reader.end()
                # Counted before somebody has what they wanted, and closes this.
                lease.sent.prompt_tokens += len(asked.prompt)
                if reader.cached_tokens is not None:
                    lease.sent.cached_tokens = (
                        lease.sent.cached_tokens or 0
                    ) + reader.cached_tokens
                for token in last:
                    yield token
        except (httpx.TransportError, httpx.DecodingError) as error:
            absent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = "it cannot be reached" if absent else "it broke the connection"
            reason = excerpt(str(error) or type(error).__name__)
            raise RemoteError(f"{what}: {reason}", retryable=True) from error


def headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {checked_key(api_key)}"}


def is_retryable(status: int) -> bool:
    return status in (408, 409, 425, 429) or status >= 500


async def _in_time(coming: Awaitable[Any], began_s: float, limit_s: float) -> Any:
    """Wait until `limit_s` behind `began_s`, whatever else keeps a stream alive, or RemoteError."""
    try:
        async with asyncio.timeout_at(began_s + limit_s):
            return await coming
    except TimeoutError as late:
        raise RemoteError(f"it sent no token for {limit_s:g} s", retryable=True) from late


async def _refusal(response: httpx.Response, service: Service) -> RemoteError:
    """Return the error of a reply that is no stream."""
    status, said = response.status_code, "no reason came"
    with suppress(TimeoutError, ValueError, RecursionError):  # it is as it was read
        async with asyncio.timeout(service.token_s):
            said = (await response.aread()).decode("utf-8", "replace")
        found = json.loads(said)
        said = found.get("error", found) if isinstance(found, dict) else found
    if status in (401, 403):
        return RemoteError(f"it refuses the key ({status}); set PASTA_REMOTE_KEY")
    if status == 404:
        about = f"it knows no model {service.model!r}, or no completions (404: {excerpt(said)})"
        return RemoteError(about)
    after = response.headers.get("Retry-After") or ""
    return RemoteError(
        f"it failed with status {status}: {excerpt(said)}",
        retryable=is_retryable(status),
        healthy=status in _HEALTHY,
        # The header's other form, a date, is not worth a parser.
        retry_after_s=float(after) if after.isdecimal() else None,
    )
