"""An answer while it is written, for plain code and for coroutines: pieces, then a result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self, TypeVar

from pasta_decoding.api.result import Result, result_of
from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event, Progress
from pasta_decoding.runtime.loop import Cancel, Failure, Listener, News

Item = TypeVar("Item")

Start = Callable[[Listener], Cancel]
"""Hands a request in and returns what cancels it; its news go to the listener."""

Pick = Callable[[tuple[Event, ...], str], Iterable[Item]]
"""(new events, new text in reading order) -> what a stream yields of them."""


class Reading:
    """What a reader has seen of one answer so far.

    answer: as decoding left it, once it is complete,
    result: and as the front door hands it out.
    """

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        self.answer: Answer | None = None
        self.result: Result | None = None
        self._count_tokens = count_tokens
        self._shown: list[str] = []

    def take(self, news: News) -> tuple[tuple[Event, ...], str]:
        """Return the events and the text that `news` brings. Raises the error of a failure."""
        match news:
            case Failure(error):
                raise error
            case Progress(events, text):
                self._shown.append(text)
                return events, text
            case _:
                text = "".join(self._shown)
                self.answer = news
                self.result = result_of(news, text=text, plain_tokens=self._count_tokens(text))
                return (), ""


def text_of(_events: tuple[Event, ...], text: str) -> Iterable[str]:
    """Pick the text in reading order."""
    return (text,) if text else ()


def events_of(events: tuple[Event, ...], _text: str) -> Iterable[Event]:
    """Pick the events as they happen."""
    return events


class Stream(Iterator[Item], AsyncIterator[Item]):
    """Iterate, by `for` or by `async for`, to get an answer piece by piece; then read `result`.

    Closing it early, or dropping it, cancels the answer and frees what it holds. One thread or one
    coroutine at a time may read it; any number of streams of one model may be read side by side.
    """

    def __init__(self, start: Start, reading: Reading, pick: Pick[Item]) -> None:
        self._reading, self._pick = reading, pick
        self._ready: deque[Item] = deque()
        self._left = False
        self._inbox = _Inbox()
        self._cancel = start(self._inbox.put)  # not a method of `self`, which may be dropped

    @property
    def result(self) -> Result:
        """The finished answer. Raises PastaError before the stream has ended."""
        if self._reading.result is None:
            raise PastaError("the answer is not complete", hint="Read the stream to its end.")
        return self._reading.result

    @property
    def answer(self) -> Answer:
        """The answer as decoding left it: token ids, layouts, trace. Raises as `result` does."""
        assert self.result is not None
        assert self._reading.answer is not None, "it comes with the result"
        return self._reading.answer

    def __next__(self) -> Item:
        """Wait for the next piece. Raises what the engine raised, if the answer failed."""
        while not self._ready:
            if self._over:
                raise StopIteration
            try:
                self._take(self._inbox.get())
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    async def __anext__(self) -> Item:
        """Wait for the next piece; errors as above. Being cancelled cancels the answer."""
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            try:
                self._take(await self._inbox.wait())
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel the answer unless it is complete. Let go of whoever waits for a piece."""
        if not self._over:
            self._cancel()
        self._left = True
        self._inbox.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_cancel"):
            self.close()

    @property
    def _over(self) -> bool:
        return self._left or self._reading.result is not None

    def _take(self, news: News | None) -> None:
        if news is not None:  # else it was closed meanwhile
            self._ready.extend(self._pick(*self._reading.take(news)))


class _Inbox:
    """News of one answer, which a thread or a coroutine waits for. None: there will be no more."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News | None] = SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, news: News | None) -> None:
        """Add news, in any thread."""
        self._news.put(news)
        if (wake := self._wake) is not None:
            with suppress(RuntimeError):  # whose loop has ended has given up
                wake()

    def get(self) -> News | None:
        """Wait in a thread."""
        return self._news.get()

    async def wait(self) -> News | None:
        """Wait in an event loop."""
        came = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, came.set)
        while True:
            with suppress(Empty):
                return self._news.get_nowait()
            await came.wait()
            came.clear()
