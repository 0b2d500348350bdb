"""An answer while it is written, for plain code and for coroutines: pieces, then a result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

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


class _Pulled(Generic[Item]):
    """What both kinds of stream share: news in, items out, and a way to give up."""

    def __init__(self, reading: Reading, pick: Pick[Item]) -> None:
        self._reading, self._pick = reading, pick
        self._ready: deque[Item] = deque()
        self._cancel: Cancel | None = None
        self._left = False

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

    @property
    def _over(self) -> bool:
        return self._left or self._reading.result is not None

    def _give_up(self) -> None:
        if not self._over and self._cancel is not None:
            self._cancel()
        self._left = True


class Stream(_Pulled[Item], Iterator[Item]):
    """Iterate to get an answer piece by piece; `result` is there at the end.

    Closing it early, or dropping it, cancels the answer and frees what it holds. One thread at a
    time may read it; any number of streams of one model may be read side by side.
    """

    def __init__(self, start: Start, reading: Reading, pick: Pick[Item]) -> None:
        super().__init__(reading, pick)
        self._inbox: SimpleQueue[News | None] = SimpleQueue()  # None: closed meanwhile
        self._cancel = start(self._inbox.put)

    def __next__(self) -> Item:
        """Wait for the next piece. Raises what the engine raised, if the answer failed."""
        while not self._ready:
            if self._over:
                raise StopIteration
            try:
                news = self._inbox.get()
                if news is None:
                    raise StopIteration
                self._ready.extend(self._pick(*self._reading.take(news)))
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel the answer unless it is complete. Who reads it in another thread is let go."""
        self._give_up()
        self._inbox.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncStream(_Pulled[Item], AsyncIterator[Item]):
    """As `Stream`, for one event loop."""

    def __init__(self, start: Start, reading: Reading, pick: Pick[Item]) -> None:
        super().__init__(reading, pick)
        self._start = start
        self._inbox: asyncio.Queue[News | None] = asyncio.Queue()  # None: closed meanwhile

    async def __anext__(self) -> Item:
        """Wait for the next piece; errors as of `Stream`. Being cancelled cancels the answer."""
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            try:
                self._begin()
                news = await self._inbox.get()
                if news is None:
                    raise StopAsyncIteration
                self._ready.extend(self._pick(*self._reading.take(news)))
            except BaseException:
                self._give_up()
                raise
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Cancel the answer unless it is complete. Who reads it in another task is let go."""
        self._give_up()
        self._inbox.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._give_up()

    def _begin(self) -> None:
        if self._cancel is None:
            loop, inbox = asyncio.get_running_loop(), self._inbox  # not `self`: it may be dropped
            self._cancel = self._start(lambda news: _hand_over(loop, inbox, news))


def _hand_over(
    loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[News | None], news: News
) -> None:
    with suppress(RuntimeError):  # whose loop has ended has given up
        loop.call_soon_threadsafe(inbox.put_nowait, news)
