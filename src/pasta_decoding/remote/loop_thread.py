"""One thread with an event loop that asks servers: the counterpart of `runtime.engine_thread`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pasta_decoding.remote.decoder import RemoteDecoder
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.engine_thread import (
    Failure,
    Listener,
    Progress,
    Ticket,
    closed_error,
)
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request


@dataclass(eq=False, slots=True)
class _Writing:
    """One request, its task, and whether anybody still wants to hear of it."""

    writer: AnswerWriter
    loop: asyncio.AbstractEventLoop
    future: Future[Answer] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.writer.stop)


class LoopThread:
    """See `Worker`. Holds connections to the decoder's servers until it is closed."""

    def __init__(self, decoder: RemoteDecoder) -> None:
        self._decoder = decoder
        self._handing_in = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="pasta-remote", daemon=True
        )
        self._thread.start()
        self._pool = ReplicaPool(decoder.service)
        self._run(self._pool.__aenter__())

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """See `Worker`."""
        self._decoder.check(request)

        def tell(events: Sequence[Event], _step: int) -> None:
            if not writing.cancelled:
                listener(Progress(tuple(events)))

        with self._handing_in:
            if self._closed:
                raise closed_error()
            writer = self._decoder.writer(request, self._pool, tell)
            writing = _Writing(writer, self._loop)
            writing.future = asyncio.run_coroutine_threadsafe(writer.run(), self._loop)
        writing.future.add_done_callback(partial(self._end, writing, listener))
        return writing

    def close(self) -> None:
        """See `Worker`."""
        with self._handing_in:
            if self._closed:
                return
            self._closed = True
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.__aexit__()

    def _end(self, writing: _Writing, listener: Listener, future: Future[Answer]) -> None:
        if writing.cancelled:
            return
        if future.cancelled():
            listener(Failure(closed_error()))
        elif error := future.exception():
            listener(Failure(error))
        else:
            listener(future.result())
