"""The socket, and uvicorn on it: how many connections there are, and how the server stops."""

import asyncio
import math
import resource
import socket
from collections.abc import Sequence

import psutil
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pasta_decoding.errors import errors_as
from pasta_decoding.server.backend import Backend

GRACE_S = 5
"""Time for clients to read why their answers ended when the server stops."""
HEAD_S = 60.0
"""Time for a new connection to send the complete head of a request; then it is closed."""
MAX_CONNECTIONS = 256
"""Open connections, idle ones included. uvicorn's own limit counts requests instead."""


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


class Connection(H11Protocol):
    """A connection that closes at once if there are more than `max_connections`."""

    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        self.loop.call_later(HEAD_S, self._close_silent)

    def _close_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


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
        await asyncio.sleep(self._drain_s)
        for backend in self._backends:
            await backend.stop()


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
        timeout_graceful_shutdown=math.ceil(drain_s + GRACE_S),
    )
    return Server(config, backends, drain_s)
