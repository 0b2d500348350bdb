"""The middleware that every request passes: API key, size of the body, name, count and log.

It is plain ASGI. Starlette's base class for middleware would hide that a client has left.
"""

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pasta_decoding.errors import excerpt
from pasta_decoding.server.errors import ApiError, failure
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Settings

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no API key: they show nothing of other clients' requests."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """The middleware. `metrics` counts the replies."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, settings: Settings) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it; then log a line about it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = "-"
        request_id = _request_id(Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                self._metrics.count("requests", 1, status)
                MutableHeaders(scope=message).update(
                    {"X-Request-Id": request_id, "X-Content-Type-Options": "nosniff"}
                )
            await send(message)

        try:
            await self._let_in(scope, receive, send_with_id)
        except ApiError as refusal:
            await refusal.response()(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s failed", request_id)
            if status != "-":  # the reply had begun: the connection breaks off
                raise
            await failure(error).response()(scope, receive, send_with_id)
        finally:
            route = f"{scope['method']} {excerpt(scope['path'])}"
            client = (scope.get("client") or ("-",))[0]
            duration_s = time.perf_counter() - began_s
            log.info("%s %s %s %s %.3f s", request_id, client, route, status, duration_s)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Repeated and final slashes change nothing. HEAD is GET: uvicorn drops the body.
        path = re.sub("//+", "/", scope["path"]).rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        self._check_headers(Headers(scope=scope), path)
        receive_body = await self._read_body(receive)
        await self._app({**scope, "path": path, "method": method}, receive_body, send)

    def _check_headers(self, headers: Headers, path: str) -> None:
        """Raise ApiError for two lengths of the body, and without the API key."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy before us may have used the other one, and see another request in the rest.
            message = "a body has Content-Length or Transfer-Encoding, not both"
            raise ApiError(400, message, headers={"Connection": "close"})
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        # The comparison takes constant time, which tells nothing about the key.
        is_key = secrets.compare_digest(credentials.strip().encode("latin-1"), key.encode())
        if not is_key or scheme.lower() != "bearer":
            message = "a valid API key is needed: Authorization: Bearer KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)

    async def _read_body(self, receive: Receive) -> Receive:
        """Read the body; return a `receive` that begins with it in one message.

        Raises ApiError if the body is too large or takes too long.
        """
        body = b""
        complete = False
        try:
            async with asyncio.timeout(self._settings.body_s):
                while not complete:
                    message = await receive()
                    body += message.get("body", b"")
                    complete = not message.get("more_body", False)
                    if len(body) > self._settings.max_body_bytes:
                        reason = "the body is too large for this server"
                        raise ApiError(413, reason, code="request_entity_too_large")
        except TimeoutError:
            reason = f"the body did not arrive within {self._settings.body_s:g} s"
            raise ApiError(408, reason, code="request_timeout") from None
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()

        return receive_body


def _request_id(headers: Headers) -> str:
    """Return the client's name for a request if it is a short word, else a random one."""
    request_id = headers.get("x-request-id", "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else f"req-{secrets.token_hex(12)}"
