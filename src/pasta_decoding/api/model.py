"""A loaded model that answers: the front door of Pasta for Python."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any, Self

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.result import Result
from pasta_decoding.api.streams import AsyncStream, Reading, Start, Stream, events_of, text_of
from pasta_decoding.api.worker import AnyDecoder, open_worker
from pasta_decoding.errors import PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.worker import ClosedError, News, Ticket, Worker

DEFAULT_CONCURRENCY = 16
_DEFAULT = GenerationConfig()

Prompt = str | Sequence[Mapping[str, str] | Message]
"""A question, or a conversation as OpenAI's API has it: role and content of each message."""

OnResult = Callable[[int, Result], None]


class Model:
    """A checkpoint on an engine, or on servers. Any thread may ask; answers are written together.

    Every method that answers takes a question or a conversation, a `GenerationConfig`, and fields
    of it as keyword arguments, which replace the config's own. Each raises PastaError for an empty
    prompt, for unknown roles or a wrong order of them, for a prompt that leaves no room for
    `max_tokens`, for unknown or invalid options, and after `close`.

    decoder: what is underneath, for whoever measures steps; not while this answers.
    """

    def __init__(self, decoder: AnyDecoder) -> None:
        self.decoder = decoder
        self._worker: Worker | None = None
        self._lock = Lock()
        self._closed = False

    def answer(self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any) -> Result:
        """Return the whole answer."""
        with self.stream(prompt, config, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Stream[str]:
        """Return the plain text in reading order, piece by piece as it becomes certain."""
        return Stream(*self._asked(prompt, config.updated(**options)), text_of)

    def events(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Stream[Event]:
        """Return what happens in every thread, as it happens."""
        return Stream(*self._asked(prompt, config.updated(**options)), events_of)

    def batch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig = _DEFAULT,
        *,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        on_result: OnResult | None = None,
        **options: Any,
    ) -> list[Result]:
        """Return the answers to several prompts, in their order, written side by side.

        Each has noise of its own under one seed. The first error cancels the others.

        on_result: called with the number of a prompt and its answer as soon as that is there.
        """
        _check_concurrency(max_concurrency)
        config = config.updated(**options)
        asked = [self._asked(one, config, number) for number, one in enumerate(prompts)]
        return _Batch(asked, max_concurrency, on_result).run()

    async def aanswer(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Result:
        """See `answer`. Being cancelled cancels the answer."""
        async with self.astream(prompt, config, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    def astream(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> AsyncStream[str]:
        """See `stream`."""
        return AsyncStream(*self._asked(prompt, config.updated(**options)), text_of)

    def aevents(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> AsyncStream[Event]:
        """See `events`."""
        return AsyncStream(*self._asked(prompt, config.updated(**options)), events_of)

    async def abatch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig = _DEFAULT,
        *,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        on_result: OnResult | None = None,
        **options: Any,
    ) -> list[Result]:
        """See `batch`."""
        _check_concurrency(max_concurrency)
        places = asyncio.Semaphore(max_concurrency)
        config = config.updated(**options)
        asked = [self._asked(one, config, number) for number, one in enumerate(prompts)]

        async def write(number: int, start: Start, reading: Reading) -> Result:
            async with places, AsyncStream(start, reading, text_of) as stream:
                async for _ in stream:
                    pass
            if on_result is not None:
                on_result(number, stream.result)
            return stream.result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(write(n, *one)) for n, one in enumerate(asked)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def plain_tokens(self, text: str) -> int:
        """Count the tokens of a tag-free text, tokenised alone."""
        return self.decoder.plain_tokens(text)

    def close(self) -> None:
        """Cancel everything and free the engine's thread. Again, it does nothing."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """See `__enter__`."""
        self.close()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """See `__aenter__`."""
        await asyncio.to_thread(self.close)

    def _asked(
        self, prompt: Prompt, config: GenerationConfig, number: int = 0
    ) -> tuple[Start, Reading]:
        """Return what hands the request in, and what reads its answer."""
        rules = config.rules
        ids = self.decoder.chat_ids(_messages(prompt), rules.max_tokens)
        sampler = self.decoder.sampler(ids, config.sampling(), number)
        request = self.decoder.request_of(
            ids, rules, sampler, max_seconds=config.max_seconds, stops=config.stops
        )
        reading = Reading(config.stops, self.plain_tokens)
        return partial(self._working().submit, request), reading

    def _working(self) -> Worker:
        with self._lock:  # an engine has one worker, whichever threads ask first
            if self._closed:
                raise ClosedError
            if self._worker is None:
                self._worker = open_worker(self.decoder)
            return self._worker


def _messages(prompt: Prompt) -> list[Message]:
    """Return a prompt as a conversation. Its encoder checks roles and order."""
    return [Message("user", prompt)] if isinstance(prompt, str) else list(map(_message, prompt))


def _message(one: Mapping[str, str] | Message) -> Message:
    if isinstance(one, Message):
        return one
    match one:
        case {"role": str(role), "content": str(content)}:
            return Message(role, content)
    hint = 'A message looks like {"role": "user", "content": "Why ...?"}.'
    raise PastaError(f"{one!r} is not a message", hint=hint)


def _check_concurrency(max_concurrency: int) -> None:
    if max_concurrency < 1:
        raise PastaError(f"max_concurrency is {max_concurrency}", hint="It is at least 1.")


class _Batch:
    """Several answers under way, no more than so many at a time."""

    def __init__(
        self,
        asked: Sequence[tuple[Start, Reading]],
        max_concurrency: int,
        on_result: OnResult | None,
    ) -> None:
        self._asked = asked
        self._on_result = on_result
        self._waiting = deque(range(len(asked)))
        self._places = max_concurrency
        self._inbox: SimpleQueue[tuple[int, News]] = SimpleQueue()
        self._running: dict[int, Ticket] = {}

    def run(self) -> list[Result]:
        try:
            self._fill()
            while self._running:
                self._take(*self._inbox.get())
                self._fill()
        finally:
            for ticket in self._running.values():
                ticket.cancel()
        return [reading.result for _, reading in self._asked if reading.result is not None]

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._places:
            number = self._waiting.popleft()
            start, _ = self._asked[number]
            self._running[number] = start(
                lambda news, number=number: self._inbox.put((number, news))  # type: ignore[misc]
            )

    def _take(self, number: int, news: News) -> None:
        reading = self._asked[number][1]
        reading.take(news)
        if reading.result is not None:
            del self._running[number]
            if self._on_result is not None:
                self._on_result(number, reading.result)
