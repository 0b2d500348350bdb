"""What stands behind the server: something that writes answers, many at once, asynchronously.

The application knows no more of an engine than this. `local_backend.LocalBackend` runs one in this
process, `remote_backend.RemoteBackend` asks servers that have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.stop_filter import Placed
from pasta_decoding.server.capacity import Capacity
from pasta_decoding.server.questions import Ask, Questions


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step brought: events as they happened, and the text that can be shown now.

    step: forward steps that the answer had behind its prefill when they happened.
    tokens: those of the text, if they were asked for.
    """

    choice: int
    step: int
    events: tuple[Event, ...]
    text: str
    tokens: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer is complete."""

    choice: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer will not come. The error is the engine's, not the client's."""

    error: BaseException


class AnswerError(Exception):
    """An answer that was being written broke; the cause says why."""


class StoppedError(Exception):
    """Nothing is alive any more that could write an answer."""


class Answers:
    """The answers to one request while they are written: iterate, and close it in the end.

    All methods belong to the event loop's thread. Iterating raises AnswerError if one of the
    answers breaks.

    cancel: called once if it is closed before all answers have ended; frees what they hold.
    """

    def __init__(self, choices: int, cancel: Callable[[], None]) -> None:
        self._left = choices
        self._cancel = cancel
        self._closed = False
        self._items: asyncio.Queue[Piece | Ended | Failed] = asyncio.Queue()

    def put(self, item: Piece | Ended | Failed) -> None:
        """Add what the backend has to tell. After `close` nobody listens any more."""
        self._left -= not isinstance(item, Piece)
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Piece | Ended]:
        """Yield what comes, until all answers have ended."""
        while self._left or not self._items.empty():
            item = await self._items.get()
            if isinstance(item, Failed):
                raise AnswerError from item.error
            yield item

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._left and not self._closed:
            self._cancel()
        self._closed = True

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """See `__enter__`."""
        self.close()


class Backend(Protocol):
    """Writes answers. All methods are called from the event loop's thread and never block it."""

    @property
    def questions(self) -> Questions:
        """What turns questions into requests."""
        ...

    @property
    def capacity(self) -> Capacity:
        """What decides how many are taken in."""
        ...

    @property
    def alive(self) -> bool:
        """Can it answer?"""
        ...

    def submit(self, asks: Sequence[Ask]) -> Answers:
        """Queue a request. The caller closes what is returned.

        Raises PastaError if one of them could never be answered, BusyError if there is no room to
        wait, StoppedError if it is not `alive`; nothing is held then.
        """
        ...

    async def start(self) -> None:
        """Begin to answer, in the running event loop."""
        ...

    async def stop(self) -> None:
        """Cancel everything and free what is held. Again, it does nothing.

        Whoever waits for an answer is told: its cause is a StoppedError.
        """
        ...
