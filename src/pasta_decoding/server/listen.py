"""A socket, uvicorn on it, and the patience that uvicorn has with its clients."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pasta_decoding.errors import PastaError
from pasta_decoding.server.backend import Backend

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a client may take for a request's head, or for the rest of a body after its reply."""
UNREAD_S = 60.0
"""How long a client may read nothing of a reply that the network no longer takes."""
GRACE_S = 5
"""How long clients may take to read why their answers ended when the server stops."""
NO_FILES_EVERY_S = 60.0
"""How often the log may say that no more files can be opened."""
OTHER_FILES = 48
"""Files that are no connections: the model's, libraries', the event loop's."""


def open_socket(host: str, port: int) -> socket.socket:
    """Bind to an address; port 0 takes a free one. Raises PastaError if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        # Python's own text repeats the address.
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        message = f"cannot listen on {host}, port {port}: {reason}"
        raise PastaError(message, hint="Give another --port or --host.") from error


def is_loopback(listener: socket.socket) -> bool:
    """Can only this machine reach it?"""
    host: str = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def address(listener: socket.socket) -> str:
    """Return the address to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connections_allowed() -> int:
    """Return how many connections this process may hold, its limit on open files raised first."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # A third each: those that are held, those just accepted, and those being closed.
    return max(1, (wanted - OTHER_FILES) // 3)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes the connections that keep it waiting, and those that are too many.

    uvicorn has no such limits: it waits for ever for the rest of a head, for the rest of a body
    that has its reply already, and for a client that does not read.
    """

    max_connections = 1024
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Time the wait for a head, or for the rest of a body that has its reply already."""
        ours, theirs = self.conn.our_state, self.conn.their_state
        waits = theirs is h11.IDLE or (ours is h11.DONE and theirs is h11.SEND_BODY)
        if waits and self._late is None:
            self._late = self.loop.call_later(PATIENCE_S, self.transport.close)
        elif not waits and self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn, which gives answers some more time when it is stopped, and then ends them."""

    def __init__(
        self, config: uvicorn.Config, backends: Sequence[Backend], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._backends = backends
        self._drain_seconds = drain_seconds
        self._no_files_s = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a log that bears it if all files are open."""
        asyncio.get_running_loop().set_exception_handler(self.tell)
        await super().startup(sockets)

    def tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what goes wrong in the loop: a lack of files now and then, not at each attempt."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._no_files_s >= NO_FILES_EVERY_S:
            self._no_files_s = loop.time()
            log.warning("no more files can be opened: new connections wait")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the backends when answers have had their time; replies end by themselves then."""
        replied = asyncio.Event()
        stopping = asyncio.create_task(self._stop_backends(replied))
        try:
            await super().shutdown(sockets)
        finally:
            replied.set()
            await stopping

    async def _stop_backends(self, replied: asyncio.Event) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(replied.wait(), self._drain_seconds)
        for backend in self._backends:
            await backend.stop()


def http_server(app: FastAPI, backends: Sequence[Backend], drain_seconds: float = 5.0) -> Server:
    """Return the server; it logs only what goes wrong.

    drain_seconds: how long answers may go on once it is told to stop.
    """
    PatientProtocol.max_connections = most = connections_allowed()
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        backlog=min(1024, most),  # accepted at once, before any of them can be closed
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_seconds + GRACE_S),
    )
    return Server(config, backends, drain_seconds)
