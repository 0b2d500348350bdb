"""The outermost middleware: asks for the key, bounds and names each request, and logs it.

Plain ASGI, since the framework's own middleware base would hide that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pasta_decoding.server.errors import ApiError, excerpt, failure
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Settings

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no API key: they show nothing of other clients' requests."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """Lets requests in, counts and names them, and limits a body in size and time."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, settings: Settings) -> None:
        self._app, self._metrics, self._settings = app, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; count its reply, name it, and write a line about it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, headers, statuses = time.perf_counter(), Headers(scope=scope), list[int]()
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        named = self._named(send, name, statuses)
        # A slash behind the path changes nothing, and HEAD is GET: uvicorn drops the body.
        path = scope["path"].rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            if refusal := self._refusal(headers, path):
                await refusal.response()(scope, receive, named)
            else:
                inner = {**scope, "path": path, "method": method}
                await self._app(inner, self._bounded(receive), named)
        except Exception as error:
            log.exception("%s failed", name)
            if statuses:  # the reply had begun: the connection breaks off
                raise
            await failure(error).response()(scope, receive, named)
        finally:
            client, status = (scope.get("client") or ("-",))[0], statuses[0] if statuses else "-"
            what = f"{scope['method']} {excerpt(scope['path'])}"
            log.info(
                "%s %s %s %s %.3f s", name, client, what, status, time.perf_counter() - began_s
            )

    def _named(self, send: Send, name: str, statuses: list[int]) -> Send:
        """Return a `send` that names and counts the reply, and appends its status."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                self._metrics.count("requests", 1, str(message["status"]))
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        return named

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        """Return why a request may not come in; None if it may."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may have believed the other one, and see other requests behind it.
            message = "a body has Content-Length or Transfer-Encoding, not both"
            return ApiError(400, message, headers={"Connection": "close"})
        if self._settings.api_key is None or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Constant time: how long it takes tells nothing about the key.
        right = secrets.compare_digest(
            given.strip().encode("latin-1"), self._settings.api_key.encode()
        )
        if right and scheme.lower() == "bearer":
            return None
        message = "a valid API key is needed: Authorization: Bearer KEY"
        challenge = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, message, code="invalid_api_key", headers=challenge)

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` that gives up on a body that is too large or takes too long."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.body_s
        whole = False
        received_bytes = 0

        async def bounded() -> Message:
            nonlocal whole, received_bytes
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._settings.body_s:g} s"
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, late) from None
            whole = not message.get("more_body", False)
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._settings.max_body_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return message

        return bounded
