"""What writes answers in a thread of its own, by an engine or by servers, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.trace import Sent


class ClosedError(PastaError):
    """Nothing is there any more that could write an answer."""

    def __init__(self) -> None:
        super().__init__("the model is closed", hint="Load it again: pasta.load(...)")


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened in an answer. `step`: the forward steps behind its prefill by then."""

    events: tuple[Event, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that will not come, and why."""

    error: BaseException


News = Progress | Answer | Failure
"""An `Answer` or a `Failure` is the last of a request."""

Listener = Callable[[News], None]
"""Called in the worker's own thread: it must be quick and must not raise."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does at a moment.

    running: answers being written, and their threads that write or wait for their turn.
    cells:   of the cache that answers use, those that keep beginnings of prompts until somebody
             needs them, and all; 0 where servers have the cache.
    """

    running: int = 0
    live_threads: int = 0
    cells: int = 0
    kept_cells: int = 0
    max_slots: int = 0


class Watcher(Protocol):
    """Whoever counts what workers do. Called in their own threads."""

    def stepped(self, width: int, delays: Mapping[str, int]) -> None:
        """Count a step in which `width` threads wrote and others waited, by reason."""
        ...

    def sent(self, sent: Sent) -> None:
        """Count what an answer asked of servers, whatever ended it."""
        ...


class Ticket(Protocol):
    """A request that was handed in."""

    def cancel(self) -> None:
        """Free what the request holds, within one step; its listener hears no more. Any thread."""
        ...


class Worker(Protocol):
    """Writes answers, any number at once. Any thread may call."""

    @property
    def alive(self) -> bool:
        """Can it answer?"""
        ...

    @property
    def activity(self) -> Activity:
        """What it does now."""
        ...

    def check(self, request: Request) -> None:
        """Raise PastaError if a request could never be answered."""
        ...

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Hand in a request. Raises as `check` does, and ClosedError if it is not `alive`."""
        ...

    def close(self) -> None:
        """Cancel everything and end the thread. Listeners that wait hear of a ClosedError."""
        ...
