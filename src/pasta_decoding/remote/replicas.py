"""Servers of completions over HTTP: any number of replicas of one model, and who asks which.

All requests of one answer go to the same replica, whose prefix cache then knows what they share;
a new answer goes to the one that has the fewest. Nothing else is kept of anybody.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Self

from pasta_decoding.remote.client import Service, check_status, headers, http_library, in_time
from pasta_decoding.remote.stream import BAN, Completion, CompletionReader, RemoteError, excerpt
from pasta_decoding.runtime.answer import Sent
from pasta_decoding.runtime.guided import GuidedParams, Kind

if TYPE_CHECKING:
    from httpx2 import AsyncClient

MAX_REQUESTS = 256
"""Under way at a time, all replicas together; more wait."""
MAX_RETRY_AFTER_S = 30.0
"""The longest that a server's Retry-After is obeyed."""
PROCESSOR = "pasta-decoding:"
"""With this Pasta's logits processor begins a refusal."""
SESSION_HEADER = "X-Session-ID"
"""Names the answer, so that a router before several servers sends its requests to one."""


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
    sent: Sent = field(default_factory=Sent)
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class ReplicaPool:
    """Open connections to a service, for as long as the block runs whose context it is."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._replicas = [Replica(base_url) for base_url in service.base_urls]

    async def __aenter__(self) -> Self:
        """Make a client, in the running event loop."""
        httpx = http_library()
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._client: AsyncClient = httpx.AsyncClient(
            headers=headers(self.service.api_key),
            # The turns are its limit: waiting for one is not the server's time.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_REQUESTS),
            # Only connecting is limited here: each piece of a stream has its own time below.
            timeout=httpx.Timeout(None, connect=self.service.connect_s),
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close all connections."""
        await self._client.aclose()

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Hold a place for one answer where there are fewest."""
        lease = Lease(self._least_busy())
        try:
            yield lease
        finally:
            lease.replica.answers -= 1

    def move(self, lease: Lease, failed: Replica) -> None:
        """Let a replica cool down, and leave it, if there is another one.

        Requests of one answer may fail together: the first of them moves for all.
        """
        self._cool_down(failed)
        if lease.replica is failed:
            failed.answers -= 1
            lease.replica = self._least_busy()

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
                if begun or not error.retryable or tried >= self.service.retries:
                    if not error.healthy:
                        self._cool_down(replica)
                    raise _located(error, replica, tried + 1) from error
                if not error.healthy:
                    self.move(lease, replica)
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

    def _cool_down(self, replica: Replica) -> None:
        """Ask others for a while. Who knows what will be there then?"""
        replica.guided = None
        replica.cooldown_until_s = asyncio.get_running_loop().time() + self.service.cooldown_s

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
        check = Completion(
            prompt=asked.prompt[:1],
            max_tokens=2,
            stops=(),
            end=asked.end,
            bias=dict.fromkeys(verdicts, BAN),
            params=replace(params, kind=Kind.check, verdicts=verdicts),
        )
        try:
            async with aclosing(self._reply(replica, check, Lease(replica), guided=True)) as tokens:
                found = [token async for token in tokens]
        except RemoteError as error:
            _, is_ours, said = error.reason.partition(PROCESSOR)
            if is_ours:
                raise RemoteError(said.strip(), healthy=True) from error
            if error.retryable or not error.healthy:
                raise
            return False  # it refuses fields that it does not know
        well, seen, unseen, foreign = verdicts
        if found[:1] == [foreign]:
            raise RemoteError(
                "the model that it serves has not the reserved tokens that the answers need: "
                "serve what `pasta export --to hf` wrote",
                healthy=True,
            )
        if found == [well, unseen]:
            raise RemoteError(
                "its logits processor is not shown the tokens that were written",
                hint="--logits-processors pasta_decoding.vllm:PastaLogitsProcessor",
                healthy=True,
            )
        return found == [well, seen]

    async def _reply(
        self, replica: Replica, asked: Completion, lease: Lease, *, guided: bool
    ) -> AsyncGenerator[int]:
        """Send a request, and yield what comes."""
        httpx, reader = http_library(), CompletionReader(asked, self.service.vocabulary_size)
        now_s = asyncio.get_running_loop().time
        began_s, limit_s = now_s(), self.service.first_token_s
        request = self._client.build_request(
            "POST",
            f"{replica.base_url}/completions",
            json=asked.body(self.service.model, guided=guided),
            headers={SESSION_HEADER: lease.session},
        )
        try:
            response = await in_time(self._client.send(request, stream=True), began_s, limit_s)
            async with aclosing(response):
                await check_status(response, self.service)
                pieces = response.aiter_bytes()
                while (piece := await in_time(anext(pieces, None), began_s, limit_s)) is not None:
                    received = reader.received
                    for token in reader.feed(piece):
                        yield token
                    if reader.received > received:
                        began_s, limit_s = now_s(), self.service.token_s
                last = reader.end()
                # Counted before somebody has what they wanted, and closes this.
                lease.sent.add(len(asked.prompt), reader.cached_tokens)
                for token in last:
                    yield token
        except (httpx.TransportError, httpx.DecodingError) as error:
            absent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = "it cannot be reached" if absent else "it broke the connection"
            reason = excerpt(str(error) or type(error).__name__)
            raise RemoteError(f"{what}: {reason}", retryable=True) from error


def _located(error: RemoteError, replica: Replica, tries: int) -> RemoteError:
    about = f"the server at {replica.base_url} failed: {error}"
    message = about if tries == 1 else f"{about} (tries: {tries})"
    return RemoteError(message, hint=error.hint, reason=error.reason)
