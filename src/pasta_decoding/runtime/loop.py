"""One thread that owns an engine, and what it reports: requests in, news back by callbacks.

Callers put calls into an inbox, and the engine's thread makes them between two steps. So nobody
waits for a step to hand something in, and a cancelled request is gone within one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from pasta_decoding.engines.support import release_openmp_threads
from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Progress
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.policy import SchedulingPolicy
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.trace import Sent


class ClosedError(PastaError):
    """The worker is closed and writes no more answers."""

    def __init__(self) -> None:
        super().__init__("the model is closed", hint="Load it again: pasta.load(...)")


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that will not come, and why."""

    error: BaseException


News = Progress | Answer | Failure
"""An `Answer` or a `Failure` is the last of a request."""

Listener = Callable[[News], None]
"""Called in the worker's own thread: it must be quick and must not raise."""

Cancel = Callable[[], object]
"""Frees what a request holds, within one step; its listener hears no more. Any thread may call."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does at a moment.

    running:      answers being written.
    live_threads: their threads that write or wait for their turn.
    cells:        of the cache, used by answers; 0 where servers have the cache, as the next two.
    kept_cells:   of the cache, with prefixes of ended answers until the room is needed.
    max_slots:    of the whole cache.
    """

    running: int = 0
    live_threads: int = 0
    cells: int = 0
    kept_cells: int = 0
    max_slots: int = 0


class Watcher(Protocol):
    """Counts what workers do. Called in their threads."""

    def stepped(self, width: int, delays: Mapping[str, int]) -> None:
        """Count a step in which `width` threads wrote and others waited, by reason."""
        ...

    def sent(self, sent: Sent) -> None:
        """Count what an answer asked of servers, whatever ended it."""
        ...


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    listener: Listener


class EngineLoop:
    """Writes answers, any number at once, with the decoder's engine, until it is closed.

    Any thread may call. `remote.RemoteWorker` is the same for servers.

    max_requests: how many answers are written at a time, and
    policy: who writes in which step; see `Scheduler`.
    activity: as of the last step.
    """

    def __init__(
        self,
        decoder: LocalDecoder,
        *,
        max_requests: int | None = None,
        policy: SchedulingPolicy | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._scheduler = decoder.scheduler(max_requests=max_requests, policy=policy)
        self._engine = decoder.engine
        self._watcher = watcher
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: dict[object, _Job] = {}
        self._handing_in = threading.Lock()
        self._closed = False
        self._halting = False
        self._look_around()
        self._thread = threading.Thread(target=self._run, name="pasta-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Can it answer?"""
        return not self._closed

    def check(self, request: Request) -> None:
        """Raise PastaError if a request could never be answered."""
        self._scheduler.check(request)

    def submit(self, request: Request, listener: Listener) -> Cancel:
        """Hand in a request, and return what cancels it.

        Raises as `check` does, and ClosedError if this is not `alive`.
        """
        self.check(request)
        release_openmp_threads()  # the calling thread's, which may have computed
        key = object()
        with self._handing_in:
            if self._closed:
                raise ClosedError
            self._inbox.put(partial(self._begin, key, request, listener))
        return partial(self._inbox.put, partial(self._forget, key))

    def close(self) -> None:
        """Cancel everything and end the thread. Listeners that wait hear of a ClosedError."""
        with self._handing_in:
            self._closed = True
            self._inbox.put(self._halt)
        self._thread.join()

    # The engine's thread

    def _run(self) -> None:
        try:
            with closing(self._scheduler):
                while not self._halting:
                    self._take_calls()
                    if self._jobs:
                        self._step()
                    for key in list(self._jobs):
                        self._report(key)
        finally:
            self._end()

    def _take_calls(self) -> None:
        """Make the calls that have come; with nothing to write, wait for one."""
        if not self._jobs:
            self._look_around()
            release_openmp_threads()  # another engine of this process may be at work
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin(self, key: object, request: Request, listener: Listener) -> None:
        self._jobs[key] = _Job(self._scheduler.add(request), listener)

    def _step(self) -> None:
        before = self._scheduler.delays.copy()
        try:
            self._scheduler.step()
        except Exception as error:  # noqa: BLE001  `_report` tells the requests that it ended
            if not any(self._failure(job) for job in self._jobs.values()):
                # It belongs to none of them, and would come again for ever.
                for key in list(self._jobs):
                    self._end_with(key, Failure(error))
        self._look_around()
        if self._watcher is not None:
            delays = {why: count - before[why] for why, count in self._scheduler.delays.items()}
            self._watcher.stepped(self._scheduler.last_width, delays)

    def _report(self, key: object) -> None:
        job = self._jobs[key]
        if progress := self._scheduler.drain(job.number):
            job.listener(progress)
        if failure := self._failure(job):
            self._end_with(key, failure)
        elif answer := self._scheduler.result(job.number):
            self._end_with(key, answer)

    def _failure(self, job: _Job) -> Failure | None:
        try:
            self._scheduler.result(job.number)
        except BaseException as error:  # noqa: BLE001  whatever the engine raised ends this answer
            return Failure(error)
        return None

    def _end_with(self, key: object, last: Answer | Failure) -> None:
        listener = self._jobs[key].listener
        self._forget(key)
        listener(last)

    def _forget(self, key: object) -> None:
        if job := self._jobs.pop(key, None):
            self._scheduler.forget(job.number)

    def _look_around(self) -> None:
        self.activity = Activity(
            running=self._scheduler.running,
            live_threads=self._scheduler.live_threads,
            cells=self._engine.slots_in_use - self._scheduler.kept_cells,
            kept_cells=self._scheduler.kept_cells,
            max_slots=self._engine.max_slots or 0,
        )

    def _halt(self) -> None:
        self._halting = True

    def _end(self) -> None:
        """End every request with a ClosedError, those just handed in included."""
        with self._handing_in:
            self._closed = True
        while not self._inbox.empty():
            self._inbox.get()()
        for job in self._jobs.values():
            job.listener(Failure(ClosedError()))
        self._jobs.clear()
        self._look_around()
