"""Who may ask, and how much: what stands before the application, and tells of each request.

Plain ASGI, since the framework's own middleware base would hide that a client has gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pasta_decoding.server.errors import ApiError, excerpt, failure, too_many
from pasta_decoding.server.metrics import Metrics

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PORT = re.compile(r":\d*$")


@dataclass(frozen=True, slots=True)
class Entry:
    """Who may come in.

    api_key:    None asks for no key.
    hosts:      what the server may be called; None: anything. Without a key a page from elsewhere
                whose name is made to lead here (DNS rebinding) could read all answers.
    open_paths: what is shown without the key.
    """

    api_key: str | None
    hosts: frozenset[str] | None
    open_paths: frozenset[str]

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request may not come in; None if it may."""
        headers = Headers(scope=scope)
        if not self._may_be_called(headers.get("host", "")):
            return _wrong_host()
        if self.api_key is None or scope["path"] in self.open_paths:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Constant time: how long it takes tells nothing about the key.
        right = secrets.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
        return None if right and scheme.lower() == "bearer" else _no_key()

    def _may_be_called(self, host: str) -> bool:
        if self.hosts is None:
            return True
        name = _PORT.sub("", host).strip("[]").rstrip(".").lower()
        return name in self.hosts or is_loopback_name(name)


def is_loopback_name(name: str) -> bool:
    """Can `name` only ever mean the machine that says it?"""
    numbers = re.fullmatch(r"127(\.\d{1,3}){3}", name)
    return name in ("localhost", "::1") or name.endswith(".localhost") or numbers is not None


@dataclass(slots=True)
class Places:
    """How many answers each client has under way. `most` None sets no limit."""

    most: int | None = None
    _taken: Counter[str] = field(default_factory=Counter)

    def take(self, client: str, answers: int) -> Callable[[], None]:
        """Take places; returns what gives them back, once. Raises ApiError if there are too few."""
        if self.most is None:
            return lambda: None
        if answers > self.most:
            message = (
                f"a client may have {self.most} answers under way, and this asks for {answers}"
            )
            raise ApiError(400, message, param="n", code="client_limit")
        if self._taken[client] + answers > self.most:
            message = f"a client may have {self.most} answers under way at a time"
            raise too_many(message, "client_limit", retry_after_s=1)
        self._taken[client] += answers

        def give_back() -> None:
            self._taken[client] -= answers
            if not self._taken[client]:
                del self._taken[client]

        return give_back


class Guard:
    """Lets requests in, counts and names them, and gives a body only so much room and time."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, entry: Entry, max_body_bytes: int, body_s: float
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._entry = entry
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif refusal := self._entry.refusal(scope):
            await self._told(refusal.response(), scope, receive, send)
        else:
            # What would be sent of a HEAD's body is dropped below, by uvicorn.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            inner = {**scope, "method": method}
            await self._told(self._app, inner, self._bounded(receive), send, scope["method"])

    async def _told(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, method: str | None = None
    ) -> None:
        """Run `app`; count its reply, name it, and write a line about it."""
        began_s, status = time.perf_counter(), 0
        name = _request_id(Headers(scope=scope))

        async def telling(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.replied(status)
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            await app(scope, receive, telling)
        except Exception as error:
            log.exception("%s failed", name)
            if status:  # the reply had begun: the connection breaks off
                raise
            await failure(error).response()(scope, receive, telling)
        finally:
            client = (scope.get("client") or ("-",))[0]
            what = f"{method or scope['method']} {excerpt(scope['path'])}"
            seconds = time.perf_counter() - began_s
            log.info("%s %s %s %s %.3f s", name, client, what, status or "-", seconds)

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` that gives up on a body that does not come, or does not end."""
        deadline_s = asyncio.get_running_loop().time() + self._body_s
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
                late = f"the body did not arrive within {self._body_s:g} s"
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, late) from None
            whole = not message.get("more_body", False)
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._max_body_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return message

        return bounded


def _request_id(headers: Headers) -> str:
    """Return the client's own name for the request, if it is one, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _no_key() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _wrong_host() -> ApiError:
    return ApiError(
        403,
        "without an API key this server answers to localhost and to its --host alone",
        code="host_not_allowed",
    )
