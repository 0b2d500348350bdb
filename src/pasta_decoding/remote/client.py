"""Servers of completions over HTTP: any number of replicas of one model, with balanced load.

All requests of one answer go to the same replica, since its prefix cache then has their shared
context. A new answer goes to the replica with the fewest answers.
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
"""Limit on the requests under way at all replicas together; further ones wait."""
MAX_RETRY_AFTER_S = 30.0
"""A longer Retry-After of a server is cut to this."""

_HEALTHY = frozenset({400, 413, 422, 429})
"""Status codes of a server that works: the request does not fit, or there are too many."""


@dataclass(frozen=True, slots=True)
class Service:
    """Where and how to ask for completions.

    base_urls:     the URL in front of `/completions`, for each replica.
    model:         its name at the servers.
    max_positions: limit on the tokens of prompt and completion together.
    api_key:       never shown.
    connect_s:     limit on the time to connect.
    first_token_s: limit on the time from a request to its first token: queue and prefill.
    token_s:       limit on the time from one token to the next.
    retries:       further tries of a request that has not brought a token.
    pause_s:       before the first retry; doubled before each further one.
    cooldown_s:    a replica that has failed gets no new answers for this time.
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
    """One server. `guided`: whether it has the logits processor; None until a check."""

    base_url: str
    answers: int = 0
    cooldown_until_s: float = 0.0
    guided: bool | None = None
    guided_check: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Lease:
    """One answer's place at a replica. It moves to another one if the replica fails."""

    replica: Replica
    usage: ServerUsage = field(default_factory=ServerUsage)
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class ReplicaPool:
    """Connections to a service, all in one event loop, until it is closed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._replicas = [Replica(base_url) for base_url in service.base_urls]
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._client = httpx.AsyncClient(
            headers=headers(service.api_key),
            # `_turns` is the limit: time in httpx's own queue would count as the server's.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_REQUESTS),
            # Only connecting is limited here; `_in_time` limits each piece of a stream.
            timeout=httpx.Timeout(None, connect=service.connect_s),
        )
        self.aclose = self._client.aclose

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Hold a place for one answer, at the replica that has the fewest answers."""
        lease = Lease(self._least_busy())
        try:
            yield lease
        finally:
            lease.replica.answers -= 1

    async def stream(self, lease: Lease, completion: Completion) -> AsyncGenerator[int]:
        """Yield the ids of a completion as they come. Closing the generator stops the server.

        A retryable error before the first id leads to another try: at another replica, unless this
        one is only busy. Raises RemoteError for all other errors, and after the last try.
        """
        for failed_tries in count():
            has_token = False
            try:
                async with self._turns:
                    replica = lease.replica  # another request may move the lease meanwhile
                    guided = await self._is_guided(replica, completion)
                    lease.usage.requests += 1
                    reply = self._reply(replica, completion, lease, guided=guided)
                    async with aclosing(reply) as tokens:
                        async for token in tokens:
                            has_token = True
                            yield token
                return
            except RemoteError as error:
                if not error.healthy:
                    self._leave(lease, replica)
                if has_token or not error.retryable or failed_tries >= self.service.retries:
                    tries = f" (tries: {failed_tries + 1})" if failed_tries else ""
                    message = f"the server at {replica.base_url} failed: {error}{tries}"
                    raise RemoteError(message, hint=error.hint, reason=error.reason) from error
                pause_s = self.service.pause_s * 2**failed_tries
                if error.retry_after_s is not None:
                    pause_s = min(error.retry_after_s, MAX_RETRY_AFTER_S)
                await asyncio.sleep(pause_s)

    def _least_busy(self) -> Replica:
        """Take a place at the replica with the fewest answers, if possible one that is ready."""
        now_s = asyncio.get_running_loop().time()
        ready = [replica for replica in self._replicas if replica.cooldown_until_s <= now_s]
        replica = min(
            ready or self._replicas, key=lambda replica: (replica.answers, replica.cooldown_until_s)
        )
        # It goes to the end of the list, so that replicas with equal load take turns.
        self._replicas.remove(replica)
        self._replicas.append(replica)
        replica.answers += 1
        return replica

    def _leave(self, lease: Lease, failed: Replica) -> None:
        """Let a replica cool down, and move the lease unless another of its requests has."""
        failed.guided = None  # the server may come back with another configuration
        failed.cooldown_until_s = asyncio.get_running_loop().time() + self.service.cooldown_s
        if lease.replica is failed:
            failed.answers -= 1
            lease.replica = self._least_busy()

    async def _is_guided(self, replica: Replica, completion: Completion) -> bool:
        """Return whether the server obeys `completion.params`. It is checked once a replica."""
        if completion.params is None:
            return False
        async with replica.guided_check:
            if replica.guided is None:
                replica.guided = await self._has_processor(replica, completion, completion.params)
            return replica.guided

    async def _has_processor(
        self, replica: Replica, completion: Completion, params: GuidedParams
    ) -> bool:
        """Send a check: a request with four banned tokens, which only the processor can write.

        Raises RemoteError if the server does not answer, or has a processor that cannot work.
        """
        ids = range(self.service.vocabulary_size)
        verdicts = tuple(islice((token for token in ids if token not in params.ids), 4))
        check = replace(
            completion,
            prompt=completion.prompt[:1],
            max_tokens=2,
            stops=(),
            bias=dict.fromkeys(verdicts, BAN),
            params=replace(params, kind=GuideKind.check, verdicts=verdicts),
        )
        try:
            async with aclosing(self._reply(replica, check, Lease(replica), guided=True)) as tokens:
                reply = [token async for token in tokens]
        except RemoteError as error:
            _, from_processor, reason = error.reason.partition("pasta-decoding:")
            if from_processor:
                raise RemoteError(reason.strip(), healthy=True) from error
            if error.retryable or not error.healthy:
                raise
            return False  # the server refuses fields that it does not know
        well, seen, unseen, foreign = verdicts
        if reply[:1] == [foreign]:
            message = "the model that it serves has not the reserved tokens that the answers need"
            raise RemoteError(f"{message}: serve what `pasta export --to hf` wrote", healthy=True)
        if reply == [well, unseen]:
            raise RemoteError(
                "its logits processor is not shown the tokens that were written",
                hint="--logits-processors pasta_decoding.vllm.processor:PastaLogitsProcessor",
                healthy=True,
            )
        return reply == [well, seen]

    async def _reply(
        self, replica: Replica, completion: Completion, lease: Lease, *, guided: bool
    ) -> AsyncGenerator[int]:
        """Yield the ids of one try at one replica. Raises RemoteError."""
        reader = CompletionReader(completion, self.service.vocabulary_size)
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        limit_s = self.service.first_token_s
        request = self._client.build_request(
            "POST",
            f"{replica.base_url}/completions",
            json=completion.body(self.service.model, guided=guided),
            headers={"X-Session-ID": lease.session},  # a router keeps a session on one server
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
                        began_s = now_s()
                        limit_s = self.service.token_s
                last_ids = reader.end()
                # Before the last ids: a caller that needs no more closes this generator.
                _count_prompt(lease.usage, len(completion.prompt), reader.cached_tokens)
                for token in last_ids:
                    yield token
        except (httpx.TransportError, httpx.DecodingError) as error:
            is_absent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            failure = "it cannot be reached" if is_absent else "it broke the connection"
            reason = excerpt(str(error) or type(error).__name__)
            raise RemoteError(f"{failure}: {reason}", retryable=True) from error


def _count_prompt(usage: ServerUsage, prompt_tokens: int, cached_tokens: int | None) -> None:
    usage.prompt_tokens += prompt_tokens
    if cached_tokens is not None:
        usage.cached_tokens = (usage.cached_tokens or 0) + cached_tokens


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that authorise a request. Raises PastaError for an impossible key."""
    return {} if api_key is None else {"Authorization": f"Bearer {checked_key(api_key)}"}


def is_retryable(status: int) -> bool:
    """Return whether a request with this HTTP status may succeed later."""
    return status in (408, 409, 425, 429) or status >= 500


async def _in_time(coming: Awaitable[Any], began_s: float, limit_s: float) -> Any:
    """Return the result of `coming`. Raises RemoteError if it takes until `began_s + limit_s`.

    Other signs of life, such as comments in the stream, do not extend the time.
    """
    try:
        async with asyncio.timeout_at(began_s + limit_s):
            return await coming
    except TimeoutError as error:
        raise RemoteError(f"it sent no token for {limit_s:g} s", retryable=True) from error


async def _refusal(response: httpx.Response, service: Service) -> RemoteError:
    """Return the error that a reply with another status than 200 stands for."""
    status = response.status_code
    reason: object = "no reason came"
    with suppress(TimeoutError, ValueError, RecursionError):  # no JSON: the body is the reason
        async with asyncio.timeout(service.token_s):
            body = (await response.aread()).decode("utf-8", "replace")
        reason = body
        content = json.loads(body)
        reason = content.get("error", content) if isinstance(content, dict) else content
    if status in (401, 403):
        return RemoteError(f"it refuses the key ({status}); set PASTA_REMOTE_KEY")
    if status == 404:
        message = f"it knows no model {service.model!r}, or no completions"
        return RemoteError(f"{message} (404: {excerpt(reason)})")
    retry_after = response.headers.get("Retry-After") or ""
    return RemoteError(
        f"it failed with status {status}: {excerpt(reason)}",
        retryable=is_retryable(status),
        healthy=status in _HEALTHY,
        # The other form of the header, a date, is ignored.
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
    )
