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
from pasta_decoding.server.transport import PatientProtocol

LAST_WORDS_S = 5.0
"""How long answers may go on once the server is told to stop; then those left end with an error."""
GRACE_S = 5
"""How long clients may then take to read it."""


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


def own_names(listener: socket.socket, host: str) -> frozenset[str] | None:
    """Return what a server that asks for no key may be called beside localhost.

    None, for anything, where others can reach it: whatever name they know it by is right.
    """
    return frozenset({host.lower()}) if is_loopback(listener) else None


def address(listener: socket.socket) -> str:
    """Return the address to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, which would break its replies off, but for telling clients first that it stops."""

    def __init__(
        self, config: uvicorn.Config, backends: Sequence[Backend], last_words_s: float
    ) -> None:
        super().__init__(config)
        self._backends = backends
        self._last_words_s = last_words_s

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
            await asyncio.wait_for(replied.wait(), self._last_words_s)
        for backend in self._backends:
            await backend.stop()


def http_server(
    app: FastAPI, backends: Sequence[Backend], *, last_words_s: float | None = None
) -> Server:
    """Return the server; it has no logs of its own but for what goes wrong.

    last_words_s: how long answers may go on once it is told to stop.
    """
    last_words_s = LAST_WORDS_S if last_words_s is None else last_words_s
    if not math.isfinite(last_words_s):
        raise PastaError(f"{last_words_s} is no number of seconds", hint="Give --drain-seconds 30.")
    return Server(
        uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(last_words_s + GRACE_S),
        ),
        backends,
        last_words_s,
    )
