"""The worker behind the server, and the answers that it writes.

The event loop hands requests to the worker, whose thread takes them between two steps and hands its
news to the event loop. So neither waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, cast

from pasta_decoding.answer.events import Progress
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request, Rules, SamplingParams
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


def warmed_up(decoder: Decoder) -> Decoder:
    """Return a decoder that has written a token; PastaError if it cannot."""
    if isinstance(decoder, LocalDecoder):
        prompt, rules = (decoder.vocabulary.end,), Rules(max_tokens=1)
        kinds = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
        with errors_as("the model cannot write an answer", *kinds):
            decoder.answer(decoder.request(prompt, rules, SamplingParams()))
    return decoder


class Backend:
    """Writes answers with one decoder, which is loaded when it is first needed.

    All methods are called from the event loop's thread and never block it.

    load_decoder: called in another thread, until it has returned one.
    unended:      answers that were taken in and have not ended.
    """

    def __init__(
        self, load_decoder: Callable[[], Decoder], metrics: Metrics, load: LoadLimits
    ) -> None:
        self.load, self.metrics, self._load_decoder = load, metrics, load_decoder
        self.decoder: Decoder | None = None
        self.unended, self.stopping = 0, False
        self._worker: EngineLoop | None = None
        self._starting = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._worker is not None and self._worker.alive and not self.stopping

    @property
    def activity(self) -> Activity:
        return Activity() if self._worker is None else self._worker.activity

    async def ready(self) -> Decoder:
        """Return the decoder, at work. The first call loads it; others wait for that.

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
        """Cancel everything and free what is held; answers that are left end with an error."""
        self.stopping = True
        async with self._starting:
            if self._worker is not None:
                await asyncio.to_thread(self._worker.close)

    def check_room(self, answers: int) -> None:
        """Raise ApiError if all answers of a request cannot be taken in, now or ever."""
        most = self.load.max_requests + self.load.max_queue
        if answers > most:
            message = f"these are {answers} answers, and this server takes {most} at a time"
            raise ApiError(400, message, param="n")
        if self.unended + answers > most:
            message = "the server has as many requests as it takes; try again later"
            raise ApiError(429, message, code="queue_full", headers=errors.TRY_AGAIN)

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Hand in a request's answers, once it is `ready`. The caller closes what is returned.

        Raises PastaError if one could never be answered, ApiError if not `alive` or without room.
        """
        self.check_room(len(requests))
        if self._worker is None or not self.alive:
            raise errors.gone(stopping=self.stopping)
        for request in requests:
            self._worker.check(request)
        answers, soon = Answers(self, len(requests)), cast("Any", self._loop.call_soon_threadsafe)
        for n, request in enumerate(requests):
            try:
                hear = partial(soon, answers.take, n)  # called in the worker's thread
                answers.cancels[n] = self._worker.submit(request, hear)
            except ClosedError as error:  # it has died meanwhile
                answers.take(n, Failure(error))
        return answers

    def _open(self) -> Decoder:
        decoder, target_s = self._load_decoder(), self.load.target_ms_per_token / 1e3
        scheduler = decoder.scheduler(
            max_requests=self.load.max_requests,
            policy=SchedulingPolicy(target_s or None),
            on_sent=self.metrics.sent,
        )
        self._worker = EngineLoop(scheduler, on_step=self.metrics.stepped)
        return decoder


class Answers:
    """The answers to one request while they are written: iterate, and close it in the end.

    Iterating gives the number of a choice with a `Progress`, at last with its `Answer`, and raises
    ApiError if one of the answers breaks. All methods belong to the event loop's thread.

    cancels: cancels the answer to a choice that is being written.
    """

    def __init__(self, backend: Backend, choices: int) -> None:
        self.choices = choices
        self.cancels: dict[int, Cancel] = {}
        self._backend = backend
        self._live = set(range(choices))
        self._items: asyncio.Queue[tuple[int, Progress | Answer | ApiError]] = asyncio.Queue()
        backend.unended += choices

    async def __aiter__(self) -> AsyncIterator[tuple[int, Progress | Answer]]:
        while self._live or not self._items.empty():
            choice, item = await self._items.get()
            if isinstance(item, ApiError):
                raise item
            yield choice, item

    def take(self, choice: int, news: News) -> None:
        if choice not in self._live:
            return  # nobody wants it any more
        item: Any = news
        match news:
            case Failure(error):
                self._end(choice, "failed")
                if not isinstance(error, ClosedError):
                    known = isinstance(error, PastaError)
                    log.warning("an answer failed: %s", error, exc_info=None if known else error)
                item = errors.failure(error, stopping=self._backend.stopping)
            case Answer():
                end = "stop_string" if news.stopped else news.finish_reason
                self._end(choice, end)
                self._backend.metrics.answered(news, end)
        self._items.put_nowait((choice, item))

    def close(self) -> None:
        for choice in list(self._live):
            self._end(choice, "cancelled")
            self.cancels[choice]()

    def _end(self, choice: int, end: str) -> None:
        self._live.remove(choice)
        self._backend.unended -= 1
        self._backend.metrics.count("answers", 1, end)
