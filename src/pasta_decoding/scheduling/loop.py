"""The engine loop: a thread that owns a scheduler, takes requests and reports news by callbacks.

Callers put function calls into an inbox; the loop's thread makes them between two steps. So a
caller never waits for a step, and a cancelled request ends within one step.
"""

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from pasta_decoding.answer.events import Progress
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.engines.support import release_openmp_threads
from pasta_decoding.errors import PastaError
from pasta_decoding.scheduling.scheduler import Activity


class ClosedError(PastaError):
    """The worker is closed and writes no more answers."""

    def __init__(self) -> None:
        super().__init__("the model is closed", hint="Load it again: pasta.load(...)")


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that has no answer: the error that it failed with."""

    error: BaseException


News = Progress | Answer | Failure
"""A report on one request. An `Answer` or a `Failure` is the last one."""

Listener = Callable[[News], None]
"""Called in the loop's thread: it must be quick and must not raise."""

Cancel = Callable[[], object]
"""Ends a request within one step; its listener is not called again. Any thread may call."""


class EngineLoop:
    """Writes answers, any number at once, until it is closed. Any thread may call.

    scheduler: a `Scheduler` or a `RemoteScheduler`; the loop closes it.
    on_step: called after each step, in the loop's thread, with the number of threads that wrote.
    activity: of the scheduler, after the last step.
    alive: whether the loop takes requests.
    """

    def __init__(
        self, scheduler: Any, *, on_step: Callable[[int], object] = lambda _threads: None
    ) -> None:
        self._scheduler = scheduler
        self._on_step = on_step
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: dict[object, tuple[Any, Listener]] = {}
        self._inbox_lock = threading.Lock()  # nothing is put in after the loop's end
        self.alive = True
        self.activity = self._scheduler.activity
        self._thread = threading.Thread(target=self._run, name="pasta-engine", daemon=True)
        self._thread.start()

    def check(self, request: Request) -> None:
        self._scheduler.check(request)

    def submit(self, request: Request, listener: Listener) -> Cancel:
        """Queue a request. Raises as `check` does, and ClosedError if the loop is not `alive`."""
        self.check(request)
        release_openmp_threads()  # those of the calling thread, which may have computed
        key = object()
        with self._inbox_lock:
            if not self.alive:
                raise ClosedError
            self._inbox.put(partial(self._begin, key, request, listener))
        return partial(self._inbox.put, partial(self._forget, key))

    def close(self) -> None:
        """End the loop's thread and all requests: each fails with a ClosedError."""
        with self._inbox_lock:
            self.alive = False
            self._inbox.put(lambda: None)  # wakes the thread
        self._thread.join()

    # In the loop's thread

    def _run(self) -> None:
        with closing(self._scheduler):
            try:
                while self.alive:
                    self._take_calls()
                    if self._jobs:
                        self._step()
                    for key in list(self._jobs):
                        self._report(key)
            finally:
                self._end()

    def _take_calls(self) -> None:
        if not self._jobs:
            self.activity = self._scheduler.activity
            release_openmp_threads()  # another engine of this process may be at work
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin(self, key: object, request: Request, listener: Listener) -> None:
        self._jobs[key] = self._scheduler.add(request), listener

    def _step(self) -> None:
        width = 0
        with suppress(Exception):  # `_report` passes it to the requests that it ended
            width = self._scheduler.step()
        self.activity = self._scheduler.activity
        self._on_step(width)

    def _report(self, key: object) -> None:
        generation, listener = self._jobs[key]
        if progress := generation.drain():
            listener(progress)
        outcome = generation.result() if generation.error is None else Failure(generation.error)
        if outcome is not None:
            del self._jobs[key]
            listener(outcome)

    def _forget(self, key: object) -> None:
        if key in self._jobs:
            generation, _ = self._jobs.pop(key)
            self._scheduler.cancel(generation)

    def _end(self) -> None:
        with self._inbox_lock:
            self.alive = False
        while not self._inbox.empty():
            self._inbox.get()()
        for _, listener in self._jobs.values():
            listener(Failure(ClosedError()))
        self._jobs.clear()
        self.activity = Activity()
