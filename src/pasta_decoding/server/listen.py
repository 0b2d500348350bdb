"""The way in: a socket, uvicorn on it, and the middleware that lets requests in.

The middleware is plain ASGI: the framework's own base would hide that a client has left.
"""

import asyncio
import logging
import math
import re
import resource
import secrets
import socket
import time
from collections.abc import Sequence

import psutil
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pasta_decoding.errors import errors_as, excerpt
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError, failure
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Settings

log = logging.getLogger(__name__)

GRACE_S = 5
"""How long clients may take to read why their answers ended when the server stops."""
HEAD_S = 60.0
"""A connection that has sent no whole head of a request by then is closed."""
MAX_CONNECTIONS = 256
"""More are closed at once, idle ones included: uvicorn's own limit is on requests."""
OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no API key: they show nothing of other clients' requests."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def open_socket(host: str, port: int) -> socket.socket:
    """Bind to an address; port 0 takes a free one. Raises PastaError if that cannot be."""
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
    soft, hard = (2**30 if one == resource.RLIM_INFINITY else one for one in limits)
    if soft < 4 * MAX_CONNECTIONS:
        soft = min(4 * MAX_CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return max(1, min(MAX_CONNECTIONS, (soft - psutil.Process().num_fds()) // 3))


class Connection(H11Protocol):
    """One of at most `most`."""

    most = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        self.loop.call_later(HEAD_S, self._close_silent)

    def _close_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn, which gives answers some more time when it is stopped, and then ends them."""

    def __init__(
        self, config: uvicorn.Config, backends: Sequence[Backend], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._backends, self._drain_seconds = backends, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for replies; those that are left end by themselves when the backends stop."""
        stopping = asyncio.create_task(self._stop_backends())
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()  # where all replied in time, the application has stopped them

    async def _stop_backends(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        for backend in self._backends:
            await backend.stop()


def http_server(app: FastAPI, backends: Sequence[Backend], drain_seconds: float = 5.0) -> Server:
    """Return the server; it logs only what goes wrong.

    drain_seconds: how long answers may go on once it is told to stop.
    """
    most = connection_limit()
    config = uvicorn.Config(
        app,
        http=type("Connection", (Connection,), {"most": most}),
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=max(8, most // 2),  # accepted before the first of them can be closed
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_seconds + GRACE_S),
    )
    return Server(config, backends, drain_seconds)


class Guard:
    """The middleware: asks for the key, bounds bodies, names, counts and logs requests."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, settings: Settings) -> None:
        self._app, self._metrics, self._settings = app, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; count its reply, name it, and write a line about it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), "-"
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                self._metrics.count("requests", 1, status)
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"], sent["X-Content-Type-Options"] = name, "nosniff"
            await send(message)

        try:
            await self._let_in(scope, receive, named)
        except ApiError as refusal:
            await refusal.response()(scope, receive, named)
        except Exception as error:
            log.exception("%s failed", name)
            if status != "-":  # the reply had begun: the connection breaks off
                raise
            await failure(error).response()(scope, receive, named)
        finally:
            client, seconds = (scope.get("client") or ("-",))[0], time.perf_counter() - began_s
            what = f"{scope['method']} {excerpt(scope['path'])}"
            log.info("%s %s %s %s %.3f s", name, client, what, status, seconds)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Slashes too many change nothing, and HEAD is GET: uvicorn drops the body.
        path = re.sub("//+", "/", scope["path"]).rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        self._check(Headers(scope=scope), path)
        whole = await self._whole(receive)
        await self._app({**scope, "path": path, "method": method}, whole, send)

    def _check(self, headers: Headers, path: str) -> None:
        """Raise ApiError if a request may not come in."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may have believed the other one, and see other requests behind it.
            message = "a body has Content-Length or Transfer-Encoding, not both"
            raise ApiError(400, message, headers={"Connection": "close"})
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Constant time: how long it takes tells nothing about the key.
        right = secrets.compare_digest(given.strip().encode("latin-1"), key.encode())
        if not right or scheme.lower() != "bearer":
            message = "a valid API key is needed: Authorization: Bearer KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)

    async def _whole(self, receive: Receive) -> Receive:
        """Return a `receive` that has the whole body; ApiError if it is too large or too slow."""
        body, more, most = b"", True, self._settings.max_body_bytes
        try:
            async with asyncio.timeout(self._settings.body_s):
                while more:
                    message = await receive()
                    body, more = body + message.get("body", b""), message.get("more_body", False)
                    if len(body) > most:
                        late = "the body is too large for this server"
                        raise ApiError(413, late, code="request_entity_too_large")
        except TimeoutError:
            late = f"the body did not arrive within {self._settings.body_s:g} s"
            raise ApiError(408, late, code="request_timeout") from None
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return waiting.pop() if waiting else await receive()

        return whole
