"""Requests to servers, many at once, for two kinds of callers.

`RemoteWorker` is a thread with the event loop that asks; `RemoteScheduler` goes on step by step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.runtime.answer import Answer, Sent
from pasta_decoding.runtime.events import Progress
from pasta_decoding.runtime.loop import (
    Cancel,
    ClosedError,
    Failure,
    Listener,
    News,
)
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.scheduler import Activity

if TYPE_CHECKING:
    from pasta_decoding.remote.decoder import RemoteDecoder


class RemoteWorker:
    """As `EngineLoop`, over servers. Holds connections to them until it is closed.

    max_requests: how many answers are written at a time; None sets no limit.
    on_sent: called with what an answer asked of servers, whatever ended it.
    """

    def __init__(
        self,
        decoder: RemoteDecoder,
        *,
        max_requests: int | None = None,
        on_sent: Callable[[Sent], object] | None = None,
    ) -> None:
        self._decoder, self._on_sent = decoder, on_sent
        self._places = asyncio.Semaphore(max_requests) if max_requests else nullcontext()
        # The answers' own tasks, and who writes in those that have a place.
        self._writers: dict[asyncio.Task[Any] | None, AnswerWriter | None] = {}
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

    @property
    def activity(self) -> Activity:
        writers = [one for one in tuple(self._writers.values()) if one is not None]
        live = sum(len(one.interpreter.writing) for one in writers)
        return Activity(running=len(writers), live_threads=live)

    def check(self, request: Request) -> None:
        self._decoder.check(request)

    def submit(self, request: Request, listener: Listener) -> Cancel:
        self.check(request)
        with self._handing_in:
            if self._closed:
                raise ClosedError
            return asyncio.run_coroutine_threadsafe(
                self._write(request, listener), self._loop
            ).cancel

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

    async def _write(self, request: Request, listener: Listener) -> None:
        task = asyncio.current_task()
        last: Answer | Failure | None = None
        self._writers[task] = None
        try:
            async with self._places:
                writer = AnswerWriter(request, self._decoder.vocabulary, self._pool, listener)
                self._writers[task] = writer
                try:
                    last = await writer.run()
                finally:
                    if self._on_sent is not None:
                        self._on_sent(writer.lease.sent)
        except asyncio.CancelledError:
            last = Failure(ClosedError()) if self._closed else None
            raise
        except Exception as error:  # noqa: BLE001  whoever asked hears of it
            last = Failure(error)
        finally:
            del self._writers[task]
            if last is not None:
                listener(last)

    async def _stop(self) -> None:
        # Only the answers' own tasks: each ends those that it began. anyio leaves a coroutine
        # unawaited whose task is cancelled from outside before it ran.
        tasks = [task for task in self._writers if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.__aexit__()


@dataclass(eq=False)
class Asked:
    """One request of a `RemoteScheduler`; `last` is what ended it."""

    last: News | None = None

    def result(self) -> Answer | None:
        if isinstance(self.last, Failure):
            raise self.last.error
        return self.last if isinstance(self.last, Answer) else None


class RemoteScheduler:
    """Implements `RequestScheduler` by a worker, which it closes. Not for several threads."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker
        self._news: SimpleQueue[tuple[Asked, News]] = SimpleQueue()
        self._cancels: dict[Asked, Cancel] = {}

    def add(self, request: Request) -> Asked:
        asked = Asked()
        self._cancels[asked] = self._worker.submit(
            request, lambda news: self._news.put((asked, news))
        )
        return asked

    def step(self) -> None:
        """Wait until an answer is over that was not; at once if none is under way."""
        while self._cancels:
            asked, news = self._news.get()
            if asked in self._cancels and not isinstance(news, Progress):
                del self._cancels[asked]
                asked.last = news
                return

    def cancel(self, asked: Asked) -> None:
        if cancel := self._cancels.pop(asked, None):
            cancel()

    def close(self) -> None:
        """Cancel everything and end all connections; it is of no use afterwards."""
        self._worker.close()
