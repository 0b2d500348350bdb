"""The bridge to an engine in this process: asyncio on one side, one engine thread on the other.

The event loop's thread puts calls into an inbox, and the engine thread makes them between two
steps; what a step brought goes back in one call. So neither waits for the other, a cancelled
request is gone within one step, and nothing is locked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from pasta_decoding.runtime.governor import CheapestStep
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.server.backend import Answers, Ended, Failed, Piece, StoppedError
from pasta_decoding.server.capacity import Capacity
from pasta_decoding.server.job import Job
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.questions import Ask, Questions

log = logging.getLogger(__name__)


class _LocalJob(Job):
    """One answer on the engine thread's side. `number` is the scheduler's, once it has it."""

    number: int | None = None


@dataclass(eq=False, slots=True)
class _Delivery:
    """What one step has for one request."""

    answers: Answers
    item: Piece | Ended | Failed


@dataclass
class LocalBackend:
    """See `Backend`. Owns the decoder's engine from `start` to `stop`.

    max_concurrency:    answers that are written together,
    queue:      and how many more may wait.
    target_ms_per_token: see `CheapestStep`; None sets no goal.
    """

    decoder: LocalDecoder
    metrics: Metrics
    max_concurrency: int = 16
    queue: int = 64
    target_ms_per_token: float | None = None
    # The engine's thread
    _inbox: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue)
    _waiting: deque[_LocalJob] = field(default_factory=deque)
    _running: list[_LocalJob] = field(default_factory=list)
    _halting: bool = False

    def __post_init__(self) -> None:
        engine = self.decoder.engine
        cells = engine.max_cells
        most = engine.max_positions if cells is None else min(cells, engine.max_positions)
        self.questions = Questions(self.decoder, most)
        self.capacity = Capacity(self.max_concurrency, self.queue)
        goal_ms = self.target_ms_per_token
        governor = CheapestStep(None if goal_ms is None else goal_ms / 1e3)
        self._scheduler = self.decoder.scheduler(governor=governor)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if cells is not None:
            self.metrics.holds(cells)

    # The event loop's thread

    @property
    def alive(self) -> bool:
        """See `Backend`."""
        return self._thread.is_alive() and not self._halting

    def submit(self, asks: Sequence[Ask]) -> Answers:
        """See `Backend`."""
        if not self.alive:
            raise StoppedError
        requests = [self.questions.request(ask) for ask in asks]
        for request in requests:
            self._scheduler.check(request)
        self.capacity.enter(len(asks))
        jobs: list[_LocalJob] = []
        answers = Answers(len(asks), cancel=partial(self._give_up, jobs))
        jobs += [
            _LocalJob(ask, request, answers, self.metrics)
            for ask, request in zip(asks, requests, strict=True)
        ]
        self._inbox.put(partial(self._waiting.extend, jobs))
        return answers

    async def start(self) -> None:
        """See `Backend`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """See `Backend`."""
        self._inbox.put(self._halt)
        await asyncio.to_thread(self._thread.join)

    def _give_up(self, jobs: list[_LocalJob]) -> None:
        """Cancel what has not ended of a request. `Answers` calls this once."""
        self._inbox.put(partial(self._cancel, jobs))

    def _hand_out(self, deliveries: Sequence[_Delivery]) -> None:
        for delivery in deliveries:
            if isinstance(delivery.item, Ended):
                self.capacity.note(delivery.item.answer)
            delivery.answers.put(delivery.item)

    def _abandon(self) -> None:
        """Tell whoever still waits that the engine's thread, which does nothing more, has ended."""
        self._halting = True
        self._make_calls()
        for job in (*self._running, *self._waiting):
            self.capacity.leave()
            job.answers.put(job.fail(StoppedError()))
        self._running.clear()
        self._waiting.clear()
        self._tell_load()

    # The engine's thread

    def _run(self) -> None:
        try:
            with closing(self._scheduler):
                while not self._halting:
                    self._take_calls()
                    self._let_in()
                    self._step()
                    self._deliver()
        finally:
            self._loop.call_soon_threadsafe(self._abandon)

    def _take_calls(self) -> None:
        """Make the calls that have come; with nothing else to do, wait for one."""
        if not self._running and not self._waiting:
            self._tell_load()
            self._inbox.get()()
        self._make_calls()

    def _make_calls(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _let_in(self) -> None:
        while self._waiting and len(self._running) < self.max_concurrency:
            job = self._waiting.popleft()
            job.number = self._scheduler.add(job.request)
            self._running.append(job)

    def _step(self) -> None:
        if not self._running:
            return
        try:
            self._scheduler.step()
        except Exception:
            # Whom it ended is told by `_news`; the others go on.
            log.exception("a step failed")
        self.metrics.stepped(self._scheduler.last_width, self._scheduler.delays)
        self._tell_load()

    def _tell_load(self) -> None:
        running = self._scheduler.running
        self.metrics.stands(
            live=self._scheduler.live_threads,
            running=running,
            waiting=len(self._waiting) + len(self._running) - running,
            cells=self.decoder.engine.cells_in_use,
        )

    def _deliver(self) -> None:
        """Send what the step brought to the event loop, in one call."""
        deliveries = [one for job in list(self._running) for one in self._news(job)]
        if deliveries:
            self._loop.call_soon_threadsafe(self._hand_out, deliveries)

    def _news(self, job: _LocalJob) -> list[_Delivery]:
        """Return what is new of an answer; take it out if it has ended."""
        assert job.number is not None, "it was let in"
        scheduler, number = self._scheduler, job.number
        items: list[Piece | Ended | Failed] = []
        if events := scheduler.drain_events(number):
            items.append(job.piece(events, scheduler.steps(number)))
        items += self._end(job, number)
        return [_Delivery(job.answers, item) for item in items]

    def _end(self, job: _LocalJob, number: int) -> Sequence[Piece | Ended | Failed]:
        """Return how an answer ended, if it did, and forget it."""
        try:
            answer = self._scheduler.result(number)
        except BaseException as error:  # noqa: BLE001  whatever the engine raised ends this answer
            self._forget(job)
            return [job.fail(error)]
        if answer is None:
            return []
        self._forget(job)
        return job.complete(answer)

    def _forget(self, job: _LocalJob) -> None:
        assert job.number is not None, "it was let in"
        self._scheduler.forget(job.number)
        self._running.remove(job)
        self._loop.call_soon_threadsafe(self.capacity.leave)

    def _cancel(self, jobs: Sequence[_LocalJob]) -> None:
        for job in jobs:
            if job in self._running:
                job.cancel()
                self._forget(job)
            elif job in self._waiting:
                job.cancel()
                self._waiting.remove(job)
                self._loop.call_soon_threadsafe(self.capacity.leave)

    def _halt(self) -> None:
        self._halting = True
