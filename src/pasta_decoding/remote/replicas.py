"""Servers of completions over HTTP: any number of replicas of one model, and who asks which.

All requests of one answer go to the same replica, whose prefix cache then knows what they share;
a new answer goes to the one that has the fewest. Nothing else is kept of anybody.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Self

from pasta_decoding.remote.capabilities import find_capabilities
from pasta_decoding.remote.client import Service, TokenLimit, check_status, headers, http_library
from pasta_decoding.remote.limiter import ConcurrencyLimiter
from pasta_decoding.remote.stream import (
    Completion,
    CompletionReader,
    RemoteError,
    ServerCapabilities,
    excerpt,
)
from pasta_decoding.runtime.trace import Sent

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

MAX_RETRY_AFTER_S = 30.0
"""The longest that a server's Retry-After is obeyed."""
SESSION_HEADER = "X-Session-ID"
"""Names the answer, so that a router before several servers sends its requests to one."""


@dataclass(slots=True, eq=False)
class _Replica:
    base_url: str
    answers: int = 0
    cooldown_until_s: float = 0.0
    capabilities: ServerCapabilities | None = None
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Lease:
    """The place of one answer at one replica. Leave it with the block that it is a context of.

    guided: whether the last request went to a server that obeys `GuidedParams`.
    """

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self.sent = Sent()
        self.guided = False
        self.session = uuid.uuid4().hex

    def __enter__(self) -> Self:
        """Take a place where there are fewest answers."""
        self.replica = self._pool.least_busy()
        self.replica.answers += 1
        return self

    def __exit__(self, *_error: object) -> None:
        """Give the place back."""
        self.replica.answers -= 1

    def move(self, failed: _Replica) -> None:
        """Let a replica cool down, and leave it, if there is another one.

        Requests of one answer may fail together: the first of them moves for all.
        """
        self._pool.cool_down(failed)
        if self.replica is not failed:
            return
        self.replica.answers -= 1
        self.replica = self._pool.least_busy()
        self.replica.answers += 1


class ReplicaPool:
    """Open connections to a service, for as long as the block runs whose context it is.

    limiter:   which threads of the answers may have a request open.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limiter = ConcurrencyLimiter()
        self._replicas = [_Replica(base_url) for base_url in service.base_urls]

    async def __aenter__(self) -> Self:
        """Make a client, in the running event loop."""
        httpx = http_library()
        service, most = self.service, self.service.connections
        self._turns = asyncio.Semaphore(most)
        self._client: AsyncClient = httpx.AsyncClient(
            headers=headers(service.api_key),
            # The turns are its limit: waiting for one is not the server's time.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=most),
            # Only connecting is limited here: each piece of a stream has its own time below.
            timeout=httpx.Timeout(None, connect=service.retry_policy.connect_s),
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close all connections."""
        await self._client.aclose()

    def lease(self) -> Lease:
        """Return a place for one answer."""
        return Lease(self)

    def least_busy(self) -> _Replica:
        """Return the replica with the fewest answers; one that cools down only if all do."""
        now_s = asyncio.get_running_loop().time()
        ready = [one for one in self._replicas if one.cooldown_until_s <= now_s]
        chosen = min(ready or self._replicas, key=lambda one: (one.answers, one.cooldown_until_s))
        # The last one asked goes to the end, so that equals take turns.
        self._replicas.remove(chosen)
        self._replicas.append(chosen)
        return chosen

    def cool_down(self, replica: _Replica) -> None:
        """Ask others for a while. Who knows what will be there then?"""
        replica.capabilities = None
        cooldown_s = self.service.retry_policy.cooldown_s
        replica.cooldown_until_s = asyncio.get_running_loop().time() + cooldown_s

    async def stream(self, lease: Lease, asked: Completion) -> AsyncGenerator[int]:
        """Yield the ids of a completion as they come. Close it, and the server stops.

        Until the first one, what may pass by itself is tried again: from the third try on, or if
        nobody is there, at another replica, unless this one is only busy. Raises RemoteError.
        """
        for tried in count():
            begun = False
            try:
                async with self._turns:
                    replica = lease.replica  # another request may move the lease meanwhile
                    async with aclosing(self._once(lease, replica, asked)) as tokens:
                        async for token in tokens:
                            begun = True
                            yield token
            except RemoteError as error:
                if begun or not error.retryable or tried >= self.service.retry_policy.retries:
                    if not error.healthy:
                        self.cool_down(replica)
                    raise _located(error, replica, tried + 1) from error
                if error.unreachable or (tried > 0 and not error.healthy):
                    lease.move(replica)
                await asyncio.sleep(self._pause_s(error, tried))
            else:
                return

    def _pause_s(self, error: RemoteError, tried: int) -> float:
        if error.retry_after_s is not None:
            return min(error.retry_after_s, MAX_RETRY_AFTER_S)
        return float(self.service.retry_policy.pause_s * 2**tried)

    async def _once(
        self, lease: Lease, replica: _Replica, asked: Completion
    ) -> AsyncGenerator[int]:
        """Ask once, and yield what comes."""
        httpx = http_library()
        try:
            capabilities = await self._capabilities(replica, asked)
            lease.guided = capabilities.guided
            lease.sent.requests += 1
            reply = self._reply(replica, asked, capabilities, lease)
            async with aclosing(reply) as tokens:
                async for token in tokens:
                    yield token
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RemoteError(
                f"it cannot be reached: {excerpt(str(error) or type(error).__name__)}",
                retryable=True,
                unreachable=True,
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = excerpt(str(error) or type(error).__name__)
            raise RemoteError(f"it broke the connection: {reason}", retryable=True) from error

    async def _capabilities(self, replica: _Replica, asked: Completion) -> ServerCapabilities:
        """Find out, once for a server, what it can do for guided requests."""
        if asked.params is None:
            return ServerCapabilities()
        async with replica.looking:
            if replica.capabilities is None:
                size, lease = self.service.vocabulary_size, Lease(self)
                ask = partial(self._reply, replica, lease=lease)
                replica.capabilities = await find_capabilities(ask, asked, asked.params, size)
            return replica.capabilities

    async def _reply(
        self,
        replica: _Replica,
        asked: Completion,
        capabilities: ServerCapabilities,
        lease: Lease,
    ) -> AsyncGenerator[int]:
        """Send a request, and yield what comes."""
        reader = CompletionReader(asked, self.service.vocabulary_size)
        limit = TokenLimit(self.service.retry_policy)
        request = self._client.build_request(
            "POST",
            f"{replica.base_url}/completions",
            json=asked.body(self.service.model, capabilities),
            headers={SESSION_HEADER: lease.session},
        )
        async with limit():
            response = await self._client.send(request, stream=True)
        try:
            await check_status(response, self.service)
            async with aclosing(self._read(response, reader, lease, limit)) as tokens:
                async for token in tokens:
                    yield token
        finally:
            await response.aclose()

    async def _read(
        self, response: Response, reader: CompletionReader, lease: Lease, limit: TokenLimit
    ) -> AsyncGenerator[int]:
        pieces = response.aiter_bytes()
        while True:
            async with limit():
                piece = await anext(pieces, None)
            if piece is None:
                break
            received = reader.received
            for token in reader.feed(piece):
                yield token
            if reader.received > received:
                limit.extend()
        last = reader.end()
        lease.sent.add(
            len(reader.asked.prompt), reader.cached_tokens
        )  # before somebody has what they wanted, and closes this
        for token in last:
            yield token


def _located(error: RemoteError, replica: _Replica, tries: int) -> RemoteError:
    about = f"the server at {replica.base_url} failed: {error}"
    message = about if tries == 1 else f"{about} (tries: {tries})"
    return RemoteError(message, hint=error.hint, reason=error.reason)
