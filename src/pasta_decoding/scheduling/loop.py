"""One thread that owns a scheduler, and what it reports: requests in, news back by callbacks.

Callers put calls into an inbox, and the engine's thread makes them between two steps. So nobody
waits for a step to hand something in, and a cancelled request is gone within one step.
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
    """An answer that will not come, and why."""

    error: BaseException


News = Progress | Answer | Failure
"""An `Answer` or a `Failure` is the last of a request."""

Listener = Callable[[News], None]
"""Called in the worker's own thread: it must be quick and must not raise."""

Cancel = Callable[[], object]
"""Frees what a request holds, within one step; its listener hears no more. Any thread may call."""


class EngineLoop:
    """Writes answers, any number at once, until it is closed. Any thread may call.

    scheduler: a `Scheduler`, or what has its methods; closed with this.
    on_step: called with the number of threads that wrote in a step, in the engine's thread.
    activity: as of the last step.
    alive: whether it takes requests.
    """

    def __init__(
        self, scheduler: Any, *, on_step: Callable[[int], object] = lambda _threads: None
    ) -> None:
        self._scheduler, self._on_step = scheduler, on_step
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: dict[object, tuple[Any, Listener]] = {}
        self._handing_in = threading.Lock()
        self.alive = True
        self.activity = self._scheduler.activity
        self._thread = threading.Thread(target=self._run, name="pasta-engine", daemon=True)
        self._thread.start()

    def check(self, request: Request) -> None:
        self._scheduler.check(request)

    def submit(self, request: Request, listener: Listener) -> Cancel:
        """Raises as `check` does, and ClosedError if this is not `alive`."""
        self.check(request)
        release_openmp_threads()  # the calling thread's, which may have computed
        key = object()
        with self._handing_in:
            if not self.alive:
                raise ClosedError
            self._inbox.put(partial(self._begin, key, request, listener))
        return partial(self._inbox.put, partial(self._forget, key))

    def close(self) -> None:
        """Cancel everything and end the thread. Listeners that wait hear of a ClosedError."""
        with self._handing_in:
            self.alive = False
            self._inbox.put(lambda: None)  # wakes the thread
        self._thread.join()

    # The engine's thread

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
        with suppress(Exception):  # `_report` tells the requests that it ended
            width = self._scheduler.step()
        self.activity = self._scheduler.activity
        self._on_step(width)

    def _report(self, key: object) -> None:
        generation, listener = self._jobs[key]
        if progress := generation.drain():
            listener(progress)
        last = generation.result() if generation.error is None else Failure(generation.error)
        if last is not None:
            del self._jobs[key]
            listener(last)

    def _forget(self, key: object) -> None:
        if job := self._jobs.pop(key, None):
            self._scheduler.cancel(job[0])

    def _end(self) -> None:
        with self._handing_in:
            self.alive = False
        while not self._inbox.empty():
            self._inbox.get()()
        for _, listener in self._jobs.values():
            listener(Failure(ClosedError()))
        self._jobs.clear()
        self.activity = Activity()
