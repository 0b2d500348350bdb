"""A socket, and uvicorn on it."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from pasta_decoding.errors import PastaError
from pasta_decoding.server.backend import Backend

GRACE_S = 5
"""How long clients may take to read why their answers ended when the server stops."""
MAX_CONNECTIONS = 1024
"""Requests on connections beyond these get status 503."""


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


class Server(uvicorn.Server):
    """uvicorn, which gives answers some more time when it is stopped, and then ends them."""

    def __init__(
        self, config: uvicorn.Config, backends: Sequence[Backend], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._backends = backends
        self._drain_seconds = drain_seconds

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
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_seconds + GRACE_S),
    )
    return Server(config, backends, drain_seconds)
