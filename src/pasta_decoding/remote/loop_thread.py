"""One thread with an event loop that asks servers: the counterpart of `runtime.engine_thread`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pasta_decoding.remote.driver import AnswerWriter, OnNews
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.service import Service
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.worker import (
    Activity,
    ClosedError,
    Failure,
    Listener,
    Progress,
    Ticket,
    Watcher,
)


class Asker(Protocol):
    """What a `RemoteDecoder` does for whoever asks its servers."""

    @property
    def service(self) -> Service:
        """Where requests go."""
        ...

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could never be answered."""
        ...

    def writer(self, request: Request, pool: ReplicaPool, on_news: OnNews) -> AnswerWriter:
        """Return what writes the answer to a request that passed `check`."""
        ...


@dataclass(eq=False, slots=True)
class _Writing:
    """One request, its task, and whether anybody still wants to hear of it."""

    listener: Listener
    future: Future[Answer] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()

    def tell(self, events: Sequence[Event], step: int) -> None:
        if not self.cancelled:
            self.listener(Progress(tuple(events), step))

    def end(self, future: Future[Answer]) -> None:
        if self.cancelled:
            return
        if future.cancelled():
            self.listener(Failure(ClosedError()))
        elif error := future.exception():
            self.listener(Failure(error))
        else:
            self.listener(future.result())


class LoopThread:
    """See `Worker`. Holds connections to the decoder's servers until it is closed.

    max_requests: how many answers are written at a time; None sets no limit.
    activity: as of the last news.
    """

    def __init__(
        self, decoder: Asker, watcher: Watcher | None = None, *, max_requests: int | None = None
    ) -> None:
        self.activity = Activity()
        self._decoder = decoder
        self._watcher = watcher
        self._places = asyncio.Semaphore(max_requests) if max_requests else nullcontext()
        self._writers: dict[asyncio.Task[Any] | None, AnswerWriter] = {}
        self._handing_in = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="pasta-remote", daemon=True
        )
        self._thread.start()
        self._pool = ReplicaPool(decoder.service)
        self._run(self._pool.__aenter__())

    @property
    def alive(self) -> bool:
        """See `Worker`."""
        return not self._closed

    def check(self, request: Request) -> None:
        """See `Worker`."""
        self._decoder.check(request)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """See `Worker`."""
        self.check(request)
        writing = _Writing(listener)
        with self._handing_in:
            if self._closed:
                raise ClosedError
            answer = self._write(request, writing)
            writing.future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        writing.future.add_done_callback(writing.end)
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

    # The loop's thread

    async def _write(self, request: Request, writing: _Writing) -> Answer:
        async with self._places:
            return await self._write_now(request, writing)

    async def _write_now(self, request: Request, writing: _Writing) -> Answer:
        writer = self._decoder.writer(request, self._pool, partial(self._tell, writing))
        task = asyncio.current_task()
        self._writers[task] = writer
        self._look_around()
        try:
            return await writer.run()
        finally:
            del self._writers[task]
            self._look_around()
            if self._watcher is not None:
                self._watcher.sent(writer.lease.sent)

    def _tell(self, writing: _Writing, events: Sequence[Event], step: int) -> None:
        self._look_around()
        writing.tell(events, step)

    def _look_around(self) -> None:
        live = sum(writer.live_threads for writer in self._writers.values())
        self.activity = Activity(running=len(self._writers), live_threads=live)

    async def _stop(self) -> None:
        # Only the answers' own tasks: each ends those that it began. anyio leaves a coroutine
        # unawaited whose task is cancelled from outside before it ran.
        tasks = [task for task in self._writers if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.__aexit__()
