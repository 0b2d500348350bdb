"""An answer while it is written, for threads and for coroutines: pieces, then a `Result`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self, TypeVar

from pasta_decoding.answer.events import Event, Progress
from pasta_decoding.answer.record import Answer, ServerUsage
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import tokens_per_step
from pasta_decoding.lang.tree import Chunk, Tree, text_form
from pasta_decoding.scheduling.loop import Cancel, Failure, Listener, News

Item = TypeVar("Item")

Start = Callable[[Listener], Cancel]
"""Submits a request and returns a function that cancels it. The listener gets its news."""

Pick = Callable[[Progress], Iterable[Item]]
"""Turns progress into the pieces that a stream yields."""


def text_of(progress: Progress) -> Iterable[str]:
    """Pick the text in reading order."""
    return (progress.text,) if progress.text else ()


def events_of(progress: Progress) -> Iterable[Event]:
    """Pick the events as they happen."""
    return progress.events


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of an answer in tokens.

    prompt_tokens: the prompt's, chat template included.
    plain_tokens:  those of the visible text, tokenised alone.
    fed_tokens:    those computed after the prompt, tags and text that was cut off included.
    """

    prompt_tokens: int
    plain_tokens: int
    fed_tokens: int


@dataclass(frozen=True, slots=True)
class Thread:
    """One decode thread that wrote a chunk.

    number:          counts from 1 in reading order.
    promised_tokens: the length that its promise named.
    """

    number: int
    topic: str | None
    promised_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer.

    text:          the answer without tags; it ends before a stop string.
    tree:          the answer as nodes (spans, chunks, syncs), a stop string included.
    threads:       the threads that wrote chunks, without the main thread.
    critical_path: forward steps after the prefill that the answer needs at unlimited width.
    finish_reason: "stop" (the model ended it, or a stop string) or "length" (a limit did).
    interventions: how often a constraint overruled the model.
    hit_limit:     did `max_tokens` end the answer? Tags count.
    seconds:       from the request to the end.
    queue_s:       from the request to its admission.
    first_token_s: from the request to the first token; None if there was none.
    sent:          requests to servers; None for an engine in this process.
    """

    text: str
    tree: Tree
    threads: tuple[Thread, ...]
    critical_path: int
    usage: Usage
    finish_reason: str
    truncated: bool
    interventions: int
    seconds: float
    queue_s: float
    first_token_s: float | None
    sent: ServerUsage | None = None
    hit_limit: bool = False

    @property
    def annotated(self) -> str:
        """The text form of `tree`, tags and escapes included."""
        return text_form(self.tree)

    @property
    def tokens_per_step(self) -> float:
        """Plain tokens / critical path: the tokens that a step wrote, on average."""
        return tokens_per_step(self.usage.plain_tokens, self.critical_path)


def result_of(answer: Answer, text: str, plain_tokens: int) -> Result:
    """Return the result of an answer whose visible text is `text`."""
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    return Result(
        text=text,
        tree=answer.tree,
        threads=tuple(
            Thread(number, chunk.topic, chunk.tokens, chunk.text)
            for number, chunk in enumerate(chunks, start=1)
        ),
        critical_path=answer.critical_path,
        usage=Usage(answer.trace.prompt_tokens, plain_tokens, answer.fed_tokens),
        finish_reason=answer.finish_reason,
        truncated=answer.truncated and not answer.stopped,
        hit_limit=answer.hit_limit,
        interventions=answer.interventions,
        seconds=answer.seconds,
        queue_s=answer.queue_s,
        first_token_s=answer.first_token_s,
        sent=answer.trace.server_usage,
    )


class Stream(Iterator[Item], AsyncIterator[Item]):
    """Iterate, by `for` or by `async for`, to get an answer piece by piece; then read `result`.

    To close or to drop a stream early cancels the answer and frees its memory. One thread or one
    coroutine at a time may read it. Any number of streams of one model may be read at once.
    """

    def __init__(self, start: Start, pick: Pick[Item], count_tokens: Callable[[str], int]) -> None:
        self._pick = pick
        self._count_tokens = count_tokens
        self._ready: deque[Item] = deque()
        self._texts: list[str] = []
        self._answer: Answer | None = None
        self._result: Result | None = None
        self._is_closed = False
        self._inbox = _Inbox()
        self._cancel = start(self._inbox.put)  # not a method of `self`, which may be dropped

    @property
    def result(self) -> Result:
        """The finished answer. Raises PastaError before the stream has ended."""
        if self._result is None:
            raise PastaError("the answer is not complete", hint="Read the stream to its end.")
        return self._result

    @property
    def answer(self) -> Answer:
        """The answer as decoding left it: token ids, layouts, trace. Raises as `result` does."""
        assert self.result is not None
        assert self._answer is not None, "it comes with the result"
        return self._answer

    def __next__(self) -> Item:
        """Wait for the next piece. Raises the engine's error if the answer failed."""
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
        """Cancel the answer unless it is complete. Wake a reader that waits for a piece."""
        if not self._over:
            self._is_closed = True
            self._cancel()
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
        return self._is_closed or self._result is not None

    def _take(self, news: News | None) -> None:
        match news:
            case Failure(error):
                raise error
            case Progress(_, text):
                self._texts.append(text)
                self._ready.extend(self._pick(news))
            case Answer():
                text = "".join(self._texts)
                self._answer = news
                self._result = result_of(news, text, self._count_tokens(text))


class _Inbox:
    """News of one answer, for which a thread or a coroutine waits. None: no more will come."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News | None] = SimpleQueue()
        self.get = self._news.get
        self._wake: Callable[[], object] | None = None

    def put(self, news: News | None) -> None:
        self._news.put(news)
        if (wake := self._wake) is not None:
            with suppress(RuntimeError):  # the reader's loop has ended
                wake()

    async def wait(self) -> News | None:
        arrival = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, arrival.set)
        while True:
            with suppress(Empty):
                return self._news.get_nowait()
            await arrival.wait()
            arrival.clear()
