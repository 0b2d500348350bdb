"""Requests to servers, many at once, for two kinds of callers.

`RemoteWorker` is a thread with the event loop that asks; `RemoteScheduler` goes on step by step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.loop import (
    Activity,
    ClosedError,
    Failure,
    Listener,
    News,
    Progress,
    Ticket,
    Watcher,
    Worker,
)
from pasta_decoding.runtime.request import Request

if TYPE_CHECKING:
    from pasta_decoding.remote.decoder import RemoteDecoder


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


class RemoteWorker:
    """Implements `Worker`. Holds connections to the decoder's servers until it is closed.

    max_requests: how many answers are written at a time; None sets no limit.
    activity: as of the last news.
    """

    def __init__(
        self,
        decoder: RemoteDecoder,
        watcher: Watcher | None = None,
        *,
        max_requests: int | None = None,
    ) -> None:
        self.activity = Activity()
        self._decoder = decoder
        self._watcher = watcher
        self._places = asyncio.Semaphore(max_requests) if max_requests else nullcontext()
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._writers: set[AnswerWriter] = set()
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
        return not self._closed

    def check(self, request: Request) -> None:
        self._decoder.check(request)

    def submit(self, request: Request, listener: Listener) -> Ticket:
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
        self._tasks.add(task := asyncio.current_task())
        try:
            async with self._places:
                return await self._write_now(request, writing)
        finally:
            self._tasks.discard(task)

    async def _write_now(self, request: Request, writing: _Writing) -> Answer:
        writer = self._decoder.writer(request, self._pool, partial(self._tell, writing))
        self._writers.add(writer)
        self._look_around()
        try:
            return await writer.run()
        finally:
            self._writers.discard(writer)
            self._look_around()
            if self._watcher is not None:
                self._watcher.sent(writer.lease.sent)

    def _tell(self, writing: _Writing, events: Sequence[Event], step: int) -> None:
        self._look_around()
        writing.tell(events, step)

    def _look_around(self) -> None:
        live = sum(writer.live_threads for writer in self._writers)
        self.activity = Activity(running=len(self._writers), live_threads=live)

    async def _stop(self) -> None:
        # Only the answers' own tasks: each ends those that it began. anyio leaves a coroutine
        # unawaited whose task is cancelled from outside before it ran.
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.__aexit__()


class RemoteScheduler:
    """Implements `RequestScheduler` by a worker, which it closes. Not for several threads."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = count()
        self._news: SimpleQueue[tuple[int, News]] = SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._over: dict[int, Answer | Failure] = {}

    def add(self, request: Request) -> int:
        return self.add_together([request])[0]

    def add_together(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests. What their prompts share is up to the servers' prefix caches."""
        for request in requests:
            self._worker.check(request)
        return [self._begin(request) for request in requests]

    def step(self) -> None:
        """Wait until an answer is over that was not; at once if none is under way."""
        while self._tickets:
            number, news = self._news.get()
            if number in self._tickets and not isinstance(news, Progress):
                del self._tickets[number]
                self._over[number] = news
                return

    def result(self, number: int) -> Answer | None:
        found = self._over.get(number)
        if isinstance(found, Failure):
            raise found.error
        return found

    def forget(self, number: int) -> None:
        if ticket := self._tickets.pop(number, None):
            ticket.cancel()
        self._over.pop(number, None)

    def close(self) -> None:
        """Cancel everything and end all connections; it is of no use afterwards."""
        self._worker.close()

    def _begin(self, request: Request) -> int:
        number = next(self._numbers)
        self._tickets[number] = self._worker.submit(
            request, lambda news: self._news.put((number, news))
        )
        return number
