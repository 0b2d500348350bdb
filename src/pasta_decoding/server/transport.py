"""Between the socket and the application: replies that notice when their client leaves."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import anyio
import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pasta_decoding.server.answers import AnswerError, Answers
from pasta_decoding.server.errors import failure
from pasta_decoding.server.replies import server_sent
from pasta_decoding.server.schema import Wire

PATIENCE_S = 10.0
"""How long a client may take for a request's head, or for what is left of it after its reply."""

UNREAD_S = 60.0
"""How long a client may read nothing of a reply that is more than the network holds for it."""

MAX_AHEAD_BYTES = 2**16
"""How much a client may send of its next requests before the reply to this one is complete."""


class CancellableReply(Response):
    """A reply that takes its time. When the client leaves, its answers are cancelled."""

    def __init__(self, answers: Answers, leave: Callable[[], None]) -> None:
        super().__init__()
        self._answers = answers
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply; every way out closes the answers, and then calls `leave`."""
        with ExitStack() as stack:
            stack.callback(self._leave)
            stack.enter_context(self._answers)
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                await self._reply(scope, receive, send)
                group.cancel_scope.cancel()

    @abstractmethod
    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class WholeReply(CancellableReply):
    """Everything at once, as JSON."""

    def __init__(
        self,
        answers: Answers,
        leave: Callable[[], None],
        whole: Callable[[Answers], Awaitable[Wire]],
    ) -> None:
        super().__init__(answers, leave)
        self._whole = whole

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = (await self._whole(self._answers)).model_dump_json()
            response = Response(body, media_type="application/json")
        except AnswerError as error:
            response = failure(error.__cause__).response()
        await response(scope, receive, send)


class StreamedReply(CancellableReply):
    """Server-sent events, ended by `[DONE]`; an error on the way is one of them."""

    def __init__(
        self, answers: Answers, leave: Callable[[], None], pieces: AsyncIterator[Wire]
    ) -> None:
        super().__init__(answers, leave)
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.raw_headers = [
            (name, value) for name, value in self.raw_headers if name != b"content-length"
        ] + [(b"content-type", b"text/event-stream; charset=utf-8")]
        self._pieces = pieces

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for piece in self._pieces:
                await send(_more(server_sent([piece])))
        except AnswerError as error:
            await send(_more(server_sent([failure(error.__cause__).body])))
        await send(_more(b"data: [DONE]\n\n"))
        await send({"type": "http.response.body"})


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _more(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class PatientProtocol(H11Protocol):
    """HTTP/1.1, with an end to patience: what does not come in time closes its connection.

    uvicorn waits for ever for the rest of a head, and for the rest of a body that has its reply
    already, so idle sockets could use up all there are. Such a rest is still read for a while: a
    connection that is closed at once may take the reply along. Nor does uvicorn mind who asks and
    never reads.
    """

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start waiting."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, unless what was waited for is complete."""
        super().data_received(data)
        self._read_on()
        self._watch()

    def on_response_complete(self) -> None:
        """Start waiting, if the reply came before the end of the request."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def pause_writing(self) -> None:
        """Start waiting for a client that does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def _read_on(self) -> None:
        """Read behind a whole request, within bounds: else nobody would see its client leave."""
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_AHEAD_BYTES:
            self.flow.resume_reading()

    def _watch(self) -> None:
        replied_early = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if self.conn.their_state is not h11.IDLE and not replied_early:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(PATIENCE_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
