"""The bridge to servers of completions: answers are written in the event loop, by requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pasta_decoding.remote.completions import RemoteError
from pasta_decoding.remote.decoder import RemoteDecoder
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request
from pasta_decoding.server.backend import Answers, StoppedError
from pasta_decoding.server.capacity import Capacity
from pasta_decoding.server.job import Job
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.questions import Ask, Questions

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RemoteBackend:
    """See `Backend`. Has connections to the decoder's servers from `start` to `stop`.

    max_concurrency:    answers that are written together,
    queue:      and how many more may wait.
    """

    decoder: RemoteDecoder
    metrics: Metrics
    max_concurrency: int = 16
    queue: int = 64
    _pool: ReplicaPool | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[AnswerWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.questions = Questions(self.decoder, self.decoder.max_positions)
        self.capacity = Capacity(self.max_concurrency, self.queue)
        self._turnstile = asyncio.Semaphore(self.max_concurrency)

    @property
    def alive(self) -> bool:
        """See `Backend`."""
        return self._pool is not None

    def submit(self, asks: Sequence[Ask]) -> Answers:
        """See `Backend`."""
        if self._pool is None:
            raise StoppedError
        requests = [self.questions.request(ask) for ask in asks]
        for request in requests:
            self.decoder.check(request)
        self.capacity.enter(len(asks))
        tasks: list[asyncio.Task[None]] = []
        answers = Answers(len(asks), cancel=lambda: _cancel(tasks))
        for ask, request in zip(asks, requests, strict=True):
            job = _RemoteJob(self, ask, request, answers)
            task = asyncio.create_task(job.run(self._pool, self._turnstile))
            task.add_done_callback(job.over)
            task.add_done_callback(self._tasks.discard)
            tasks.append(task)
        self._tasks |= set(tasks)
        self.tell_load()
        return answers

    async def start(self) -> None:
        """See `Backend`."""
        self._pool = await ReplicaPool(self.decoder.service).__aenter__()

    async def stop(self) -> None:
        """See `Backend`."""
        pool, self._pool = self._pool, None
        _cancel(list(self._tasks))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if pool is not None:
            await pool.__aexit__()

    @contextmanager
    def counted(self, writer: AnswerWriter) -> Iterator[None]:
        """Count an answer as one that is being written, for as long as the block runs."""
        self._writers.add(writer)
        self.tell_load()
        try:
            yield
        finally:
            self._writers.discard(writer)
            self.tell_load()

    def leave(self) -> None:
        """Give up the place of an answer, whatever became of it."""
        self.capacity.leave()
        self.tell_load()

    def tell_load(self) -> None:
        """Tell the metrics how much is under way."""
        live = sum(writer.live_threads for writer in self._writers)
        load, running = self.capacity.load, len(self._writers)
        waiting = load.running + load.waiting - running
        self.metrics.stands(live=live, running=running, waiting=waiting, cells=0)


class _RemoteJob(Job):
    """One answer, and the task that writes it."""

    def __init__(
        self, backend: RemoteBackend, ask: Ask, request: Request, answers: Answers
    ) -> None:
        super().__init__(ask, request, answers, backend.metrics)
        self._backend = backend

    async def run(self, pool: ReplicaPool, places: asyncio.Semaphore) -> None:
        """Wait for a place, write, and tell what became of it."""
        try:
            async with places:
                answer = await self._write(pool)
            self._backend.capacity.note(answer)
            for item in self.complete(answer):
                self.answers.put(item)
        except Exception as error:
            expected = isinstance(error, RemoteError)
            log.warning("an answer failed: %s", error, exc_info=not expected)
            self.answers.put(self.fail(error))

    def over(self, task: asyncio.Task[None]) -> None:
        """Give up the place; a task that was cancelled may not even have begun to run."""
        if task.cancelled() and self._backend.alive:
            self.cancel()
        elif task.cancelled():
            self.answers.put(self.fail(StoppedError()))
        self._backend.leave()

    async def _write(self, pool: ReplicaPool) -> Answer:
        backend = self._backend
        queue_s = self.age_s
        self._writer = backend.decoder.writer(self.request, pool, self._tell, queue_s=queue_s)
        try:
            with backend.counted(self._writer):
                return await self._writer.run()
        finally:
            backend.metrics.sent(self._writer.lease.sent)

    def _tell(self, events: Sequence[Event], step: int) -> None:
        self.answers.put(self.piece(events, step))
        self._backend.tell_load()


def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
