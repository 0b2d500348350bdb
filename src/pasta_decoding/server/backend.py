"""The worker thread behind the server, and the answers that it writes.

The event loop's thread queues requests; the worker takes them between two steps. The worker's news
are queued for the event loop in the same way. So neither thread waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, cast

from pasta_decoding.answer.events import Progress
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.scheduling.decoder import Decoder, LocalDecoder
from pasta_decoding.scheduling.loop import Cancel, ClosedError, EngineLoop, Failure, News
from pasta_decoding.scheduling.policy import SchedulingPolicy
from pasta_decoding.scheduling.scheduler import Activity
from pasta_decoding.server import errors
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import LoadLimits

log = logging.getLogger(__name__)

SILENCE_S = 15.0
"""Time after which an iteration over answers says that there is nothing yet."""


def warmed_up(decoder: Decoder) -> Decoder:
    """Let a decoder write one token; return it. Raises PastaError if it cannot."""
    if isinstance(decoder, LocalDecoder):
        engine_errors = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
        with errors_as("the model cannot write an answer", *engine_errors):
            prompt = (decoder.vocabulary.end,)
            decoder.answer(decoder.request(prompt, Rules(max_tokens=1), SamplingParams()))
    return decoder


class Backend:
    """Writes answers with one decoder, which is loaded when it is first needed.

    All methods are called from the event loop's thread and never block it.

    load_decoder: called in another thread; called again after it raised an error.
    unended:      how many answers were submitted and have not ended.
    unclosed:     the answers to each HTTP request, in the order in which they were submitted.
    """

    def __init__(
        self, load_decoder: Callable[[], Decoder], metrics: Metrics, load: LoadLimits
    ) -> None:
        self.load = load
        self.metrics = metrics
        self._load_decoder = load_decoder
        self.decoder: Decoder | None = None
        self.unended = 0
        self.unclosed: list[Answers] = []
        self.stopping = False
        self._worker: EngineLoop | None = None
        self._starting = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._worker is not None and self._worker.alive and not self.stopping

    @property
    def activity(self) -> Activity:
        return Activity() if self._worker is None else self._worker.activity

    async def ready(self) -> Decoder:
        """Return the decoder. The first call loads it and starts the worker; others wait for that.

        Raises PastaError if it cannot be loaded, ApiError after `stop`.
        """
        async with self._starting:
            if self.stopping:
                raise errors.gone(stopping=True)
            if self.decoder is None:
                self._loop = asyncio.get_running_loop()
                self.decoder = await asyncio.to_thread(self._open)
            return self.decoder

    async def stop(self) -> None:
        """Stop the worker and free the engine. Answers that have not ended get an error at once."""
        self.stopping = True
        for answers in self.unclosed:
            answers.fail()
        async with self._starting:
            if self._worker is not None:
                await asyncio.to_thread(self._worker.close)

    def check_room(self, answers: int) -> None:
        """Raise ApiError if there is no room for this number of answers, now or ever."""
        max_answers = self.load.max_requests + self.load.max_queue
        if answers > max_answers:
            message = f"these are {answers} answers, and this server takes {max_answers} at a time"
            raise ApiError(400, message, param="n")
        if self.unended + answers > max_answers:
            message = "the server has as many requests as it takes; try again later"
            raise ApiError(429, message, code="queue_full", headers=errors.TRY_AGAIN)

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Queue the answers to one HTTP request, one `Request` each. Await `ready` first.

        The caller closes the returned answers. Raises PastaError for a request that can never be
        answered, and ApiError if the worker is not alive or there is no room.
        """
        self.check_room(len(requests))
        if self._worker is None or not self.alive:
            raise errors.gone(stopping=self.stopping)
        for request in requests:
            self._worker.check(request)
        answers = Answers(self, len(requests))
        call_soon = cast("Any", self._loop.call_soon_threadsafe)
        for choice, request in enumerate(requests):
            try:
                # The worker calls `on_news` in its thread, and the event loop calls `take`.
                on_news = partial(call_soon, answers.take, choice)
                answers.cancels[choice] = self._worker.submit(request, on_news)
            except ClosedError as error:  # the worker died after the check above
                answers.take(choice, Failure(error))
        return answers

    def _open(self) -> Decoder:
        """Load the decoder and start the worker."""
        decoder = self._load_decoder()
        target_s = self.load.target_ms_per_token / 1e3
        scheduler = decoder.scheduler(
            max_requests=self.load.max_requests,
            policy=SchedulingPolicy(target_s or None),
            on_sent=self.metrics.sent,
        )
        self._worker = EngineLoop(scheduler, on_step=self.metrics.stepped)
        return decoder


class Answers:
    """The answers to one request while they are written. Iterate over them, then close them.

    Iterating yields a choice's number with each `Progress`, and at its end with its `Answer`, and
    None whenever there was nothing for `silence_s`. It raises ApiError if an answer fails. All
    methods are called in the event loop's thread.

    cancels: by the number of a choice, a function that cancels its answer.
    """

    silence_s = SILENCE_S

    def __init__(self, backend: Backend, choices: int) -> None:
        self.choices = choices
        self.cancels: dict[int, Cancel] = {}
        self._backend = backend
        self._live = set(range(choices))
        self._items: asyncio.Queue[tuple[int, Progress | Answer | ApiError]] = asyncio.Queue()
        self._begun = False
        backend.unended += choices
        backend.unclosed.append(self)

    @property
    def stage(self) -> str:
        """What the answers are doing, in words."""
        if self._begun:
            return "writing"
        earlier = self._backend.unclosed[: self._backend.unclosed.index(self)]
        place = 1 + sum(len(answers._live) for answers in earlier) - self._backend.load.max_requests
        return f"waiting in the queue, place {place}" if place > 0 else "reading the prompt"

    async def __aiter__(self) -> AsyncIterator[tuple[int, Progress | Answer] | None]:
        while self._live or not self._items.empty():
            try:
                async with asyncio.timeout(self.silence_s):
                    choice, item = await self._items.get()
            except TimeoutError:
                yield None
                continue
            self._begun = True
            if isinstance(item, ApiError):
                raise item
            yield choice, item

    def take(self, choice: int, news: News) -> None:
        """Queue news of the worker for the iteration."""
        if choice not in self._live:
            return  # it was cancelled
        item: Any = news
        match news:
            case Failure(error):
                self._end(choice, "failed")
                if not isinstance(error, ClosedError):
                    exc_info = None if isinstance(error, PastaError) else error
                    log.warning("an answer failed: %s", error, exc_info=exc_info)
                item = errors.failure(error, stopping=self._backend.stopping)
            case Answer():
                end = "stop_string" if news.stopped else news.finish_reason
                self._end(choice, end)
                self._backend.metrics.answered(news, end)
        self._items.put_nowait((choice, item))

    def fail(self) -> None:
        """End the answers that have not ended by an error, without waiting for the worker."""
        for choice in list(self._live):
            self.take(choice, Failure(ClosedError()))

    def close(self) -> None:
        """Cancel the answers that have not ended."""
        self._backend.unclosed.remove(self)
        for choice in list(self._live):
            self._end(choice, "cancelled")
            self.cancels[choice]()

    def _end(self, choice: int, end: str) -> None:
        self._live.remove(choice)
        self._backend.unended -= 1
        self._backend.metrics.count("answers", 1, end)
