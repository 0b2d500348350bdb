"""The socket, and uvicorn on it: how many connections there are, and how the server stops."""

import asyncio
import math
import resource
import socket
from collections.abc import Sequence
from typing import Any, cast

import h11
import psutil
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pasta_decoding.errors import errors_as
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError

GRACE_S = 5
"""Time for clients to read why their answers ended when the server stops."""
HEAD_S = 60.0
"""Time for the complete head of a request, from the connection or from the head's first byte."""
IDLE_S = 75
"""Time for which a connection is kept between requests. Clients and proxies keep theirs for 60."""
WRITE_S = 30.0
"""Time in which a client has to read something of the reply that waits for it."""
MAX_CONNECTIONS = 256
"""Open connections, idle ones included. uvicorn's own limit counts requests instead."""
MAX_HEAD_BYTES = 2**16
MAX_CHUNKS = 4096
"""Chunks of one body. Each takes the event loop some time, however small it is."""


def open_socket(host: str, port: int) -> socket.socket:
    """Bind to an address; port 0 takes a free one. Raises PastaError if the address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with errors_as(f"cannot listen on {host}", OSError, OverflowError):
        return socket.create_server((host, port), family=family, backlog=1024)


def is_loopback(listener: socket.socket) -> bool:
    host: str = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_limit() -> int:
    """Raise this process's limit of open files; return how many of them may be connections."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**30 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < 4 * MAX_CONNECTIONS:
        soft = min(4 * MAX_CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    free_files = soft - psutil.Process().num_fds()
    return max(1, min(MAX_CONNECTIONS, free_files // 3))


class Parser(h11.Connection):
    """Reads requests. Raises RemoteProtocolError for a body of more than MAX_CHUNKS chunks.

    chunks: of the last body.
    """

    chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data):
            self.chunks += 1
            if self.chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class Connection(H11Protocol):
    """A connection that leaves room for others, and closes if its client is too slow.

    max_connections: if there are more, the one that has waited longest for its client is closed.
        So it is if one address has more than three quarters of them.
    """

    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._waiting_since_s = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._dropped = False

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _awaits_client(self) -> bool:
        return self._awaits_head or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()
        self.loop.call_later(WRITE_S, self._close_unread, 0)
        self._make_room()

    def _make_room(self) -> None:
        address = self.client and self.client[0]
        connections = cast("set[Connection]", self.connections)
        everybody = [other for other in connections if not other._dropped]
        neighbours = [other for other in everybody if (other.client and other.client[0]) == address]
        if len(neighbours) > max(1, self.max_connections * 3 // 4):
            crowd = neighbours
        elif len(everybody) > self.max_connections:
            crowd = everybody
        else:
            return
        waiting = [other for other in crowd if other._awaits_client]  # this one at least
        longest = min(waiting, key=lambda other: other._waiting_since_s)
        longest._dropped = True
        longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        awaited_head = self._awaits_head
        super().data_received(data)
        if self._awaits_head:
            self._start_head_timer()
        elif awaited_head:
            self._waiting_since_s = self.loop.time()
            self._stop_head_timer()

    def on_response_complete(self) -> None:
        self._waiting_since_s = self.loop.time()
        super().on_response_complete()
        next_head, _ = self.conn.trailing_data
        if next_head and self._awaits_head:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._close_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_without_head(self) -> None:
        self._head_timer = None
        if self._awaits_head:
            self.transport.abort()

    def _close_unread(self, unread_before: int) -> None:
        """Close if the client read nothing of what waited for it at the last call."""
        if self not in self.connections:
            return
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes and unread_bytes == unread_before:
            self.transport.abort()
        else:
            self.loop.call_later(WRITE_S, self._close_unread, unread_bytes)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or too many chunks. Reading on for a second saves the reply.

        A connection that is closed with unread bytes is reset, and clients lose its last reply.
        """
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = ApiError(400, msg)
        if cast("Parser", self.conn).chunks > MAX_CHUNKS:
            error = ApiError(413, f"the body has more than {MAX_CHUNKS} chunks")
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(1, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn. When it is stopped, answers have some time to end; then the backends stop."""

    def __init__(self, config: uvicorn.Config, backends: Sequence[Backend], drain_s: float) -> None:
        super().__init__(config)
        self._backends = backends
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until all replies have ended. Stopped backends end the replies that take longer."""
        stopping = asyncio.create_task(self._stop_backends())
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()  # if all ended in time, the application stops the backends

    async def _stop_backends(self) -> None:
        """Stop the backends after a while, and after a further one cut off who does not read."""
        await asyncio.sleep(self._drain_s)
        stops = asyncio.gather(*(backend.stop() for backend in self._backends))
        await asyncio.sleep(GRACE_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await stops


def http_server(app: FastAPI, backends: Sequence[Backend], drain_s: float = 5.0) -> Server:
    """Return the server. It logs warnings and errors only.

    drain_s: seconds for which answers go on after the server was stopped.
    """
    max_connections = connection_limit()
    config = uvicorn.Config(
        app,
        http=type("Connection", (Connection,), {"max_connections": max_connections}),
        ws="none",
        log_level="warning",
        access_log=False,
        # uvicorn accepts a whole backlog before connections beyond the limit can be closed.
        backlog=max(8, max_connections // 2),
        server_header=False,
        timeout_keep_alive=IDLE_S,
        # uvicorn then breaks off what is left, with a traceback for each request.
        timeout_graceful_shutdown=math.ceil(drain_s + GRACE_S + 2),
    )
    return Server(config, backends, drain_s)
