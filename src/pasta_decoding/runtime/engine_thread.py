"""One thread that owns an engine: requests come from any thread, news goes back by callbacks.

Callers put calls into an inbox, and the engine's thread makes them between two steps. So nobody
waits for a step to hand something in, and a cancelled request is gone within one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step brought to one answer."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that will not come, and why."""

    error: BaseException


News = Progress | Answer | Failure
"""An `Answer` or a `Failure` is the last of a request."""

Listener = Callable[[News], None]
"""Called in the worker's own thread: it must be quick and must not raise."""


class Ticket(Protocol):
    """A request that was handed in."""

    def cancel(self) -> None:
        """Free what the request holds, within one step; its listener hears no more. Any thread."""
        ...

    def stop(self) -> None:
        """End the answer within one step: its listener gets what there is of it. Any thread."""
        ...


class Worker(Protocol):
    """Writes answers, any number at once, in a thread of its own."""

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Hand in a request. Any thread may call.

        Raises PastaError if it could never be answered, or if the worker is closed.
        """
        ...

    def close(self) -> None:
        """Cancel everything and end the thread. Listeners that wait hear a `Failure`."""
        ...


@dataclass(eq=False, slots=True)
class _Job:
    thread: EngineThread
    request: Request
    listener: Listener
    number: int | None = None

    def cancel(self) -> None:
        self.thread.call(partial(self.thread.drop, self))

    def stop(self) -> None:
        self.thread.call(partial(self.thread.end, self))


class EngineThread:
    """See `Worker`. Owns the scheduler and its engine until it is closed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: list[_Job] = []
        self._handing_in = threading.Lock()
        self._closed = False
        self._halting = False
        self._thread = threading.Thread(target=self._run, name="pasta-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """See `Worker`."""
        self._scheduler.check(request)
        job = _Job(self, request, listener)
        with self._handing_in:
            if self._closed:
                raise closed_error()
            self.call(partial(self._begin, job))
        return job

    def close(self) -> None:
        """See `Worker`."""
        with self._handing_in:
            self._closed = True
            self.call(self._halt)
        self._thread.join()

    def call(self, function: Callable[[], None]) -> None:
        """Let the engine's thread call `function` between two steps. Any thread may call."""
        self._inbox.put(function)

    # The engine's thread

    def drop(self, job: _Job) -> None:
        """Forget a job that nobody wants any more."""
        if job in self._jobs:
            self._forget(job)

    def end(self, job: _Job) -> None:
        """Let the answer of a job be what there is of it."""
        if job in self._jobs:
            assert job.number is not None, "it was added"
            self._scheduler.cancel(job.number)

    def _run(self) -> None:
        with closing(self._scheduler):
            while not self._halting:
                self._take_calls()
                self._step()
                for job in list(self._jobs):
                    self._report(job)
        for job in self._jobs:
            job.listener(Failure(closed_error()))

    def _take_calls(self) -> None:
        """Make the calls that have come; with nothing to write, wait for one."""
        if not self._jobs:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin(self, job: _Job) -> None:
        try:
            job.number = self._scheduler.add(job.request)
        except PastaError as error:
            job.listener(Failure(error))
        else:
            self._jobs.append(job)

    def _step(self) -> None:
        if not self._jobs:
            return
        try:
            self._scheduler.step()
        except Exception as error:  # noqa: BLE001  whom it ended hears of it in `_report`
            if not any(self._failed(job) for job in self._jobs):
                self._fail_all(error)

    def _report(self, job: _Job) -> None:
        assert job.number is not None, "it was added"
        if events := self._scheduler.drain_events(job.number):
            job.listener(Progress(tuple(events)))
        try:
            answer = self._scheduler.result(job.number)
        except BaseException as error:  # noqa: BLE001  whatever the engine raised ends this answer
            self._forget(job)
            job.listener(Failure(error))
            return
        if answer is not None:
            self._forget(job)
            job.listener(answer)

    def _failed(self, job: _Job) -> bool:
        assert job.number is not None, "it was added"
        try:
            self._scheduler.result(job.number)
        except BaseException:  # noqa: BLE001  only asked whether it failed
            return True
        return False

    def _fail_all(self, error: BaseException) -> None:
        """End every answer: an error that belongs to none of them would come again for ever."""
        for job in list(self._jobs):
            self._forget(job)
            job.listener(Failure(error))

    def _forget(self, job: _Job) -> None:
        assert job.number is not None, "it was added"
        self._scheduler.forget(job.number)
        self._jobs.remove(job)

    def _halt(self) -> None:
        self._halting = True


def closed_error() -> PastaError:
    """Return what whoever asks a closed model is told."""
    return PastaError("the model is closed", hint="Load it again: pasta.load(...)")
