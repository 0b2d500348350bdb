"""What stands behind the server: a queue, and a worker that writes answers in its own thread.

The event loop hands requests to the worker, which takes them between two steps. What the worker
tells goes into a deque, which the event loop empties in one call. So neither waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pasta_decoding.api.worker import AnyDecoder, open_worker
from pasta_decoding.errors import PastaError
from pasta_decoding.remote.completions import RemoteError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.governor import CheapestStep
from pasta_decoding.runtime.prompt_pace import PromptPace
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.worker import Activity, ClosedError, Failure, News, Progress, Worker
from pasta_decoding.server.answers import Answers, Ask, Job
from pasta_decoding.server.capacity import Capacity
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load

log = logging.getLogger(__name__)


class Backend:
    """Writes answers with one decoder, which is loaded when it is first needed.

    All methods are called from the event loop's thread and never block it.

    load_decoder: called in another thread, until it has returned one.
    load:         how much is done at a time.
    """

    def __init__(
        self, load_decoder: Callable[[], AnyDecoder], metrics: Metrics, load: Load
    ) -> None:
        self.load = load
        self.decoder: AnyDecoder | None = None
        self.capacity = Capacity(load.max_requests, load.max_queue)
        self._load_decoder = load_decoder
        self._metrics = metrics
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()
        self._stopped = False
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._news: deque[tuple[Job, News]] = deque()
        self._reading = False

    @property
    def alive(self) -> bool:
        """Can it answer?"""
        return self._worker is not None and self._worker.alive

    @property
    def activity(self) -> Activity:
        """What the worker does now."""
        return Activity() if self._worker is None else self._worker.activity

    async def ready(self) -> AnyDecoder:
        """Return the decoder, at work. The first call loads it; others wait for that.

        Raises PastaError if it cannot be loaded, ClosedError after `stop`.
        """
        async with self._starting:
            if self._stopped:
                raise ClosedError
            if self.decoder is None:
                self._loop = asyncio.get_running_loop()
                self.decoder = await asyncio.to_thread(self._open)
            return self.decoder

    async def stop(self) -> None:
        """Cancel everything and free what is held. Again, it does nothing.

        Whoever waits for an answer is told: its cause is a ClosedError.
        """
        self._stopped = True
        for job in list(self._waiting):
            job.take(Failure(ClosedError()))
            self._leave(job)
        async with self._starting:
            if self._worker is not None:
                await asyncio.to_thread(self._worker.close)

    def submit(self, asks: Sequence[Ask]) -> Answers:
        """Queue a request, once it is `ready`. The caller closes what is returned.

        Raises PastaError if one of them could never be answered, BusyError if there is no room to
        wait, ClosedError if it is not `alive`; nothing is held then.
        """
        worker = self._alive_worker()
        requests = [self._request(ask) for ask in asks]
        for request in requests:
            worker.check(request)
        self.capacity.enter(len(asks))
        jobs: list[Job] = []
        answers = Answers(len(asks), cancel=partial(self._cancel, jobs))
        jobs += [
            Job(ask, request, answers, self._metrics)
            for ask, request in zip(asks, requests, strict=True)
        ]
        self._waiting += jobs
        self._let_in()
        return answers

    def _open(self) -> AnyDecoder:
        decoder, target_ms = self._load_decoder(), self.load.target_ms_per_token
        governor = CheapestStep(None if target_ms is None else target_ms / 1e3)
        pace = PromptPace(stretch=self.load.stretch)
        self._worker = open_worker(decoder, governor=governor, pace=pace, watcher=self._metrics)
        return decoder

    def _alive_worker(self) -> Worker:
        if self._worker is None or not self._worker.alive or self._stopped:
            raise ClosedError
        return self._worker

    def _request(self, ask: Ask) -> Request:
        assert self.decoder is not None, "it is ready"
        sampler = self.decoder.sampler(ask.prompt, ask.sampling, ask.choice)
        return self.decoder.request_of(
            ask.prompt, ask.rules, sampler, stops=ask.stops, priority=ask.priority
        )

    def _let_in(self) -> None:
        while self._waiting and len(self._running) < self.capacity.max_concurrency:
            job = self._waiting.popleft()
            self._running.add(job)
            try:
                job.ticket = self._alive_worker().submit(job.request, partial(self._hear, job))
            except PastaError as error:  # it has died meanwhile
                job.take(Failure(error))
                self._leave(job)

    def _hear(self, job: Job, news: News) -> None:
        """Take news in, in the worker's thread."""
        self._news.append((job, news))
        if not self._reading:
            self._reading = True
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        self._reading = False  # first: what comes from now on may come too late for this call
        while self._news:
            self._take(*self._news.popleft())

    def _take(self, job: Job, news: News) -> None:
        if job not in self._running:
            return  # nobody wants it any more
        if isinstance(news, Answer):
            self.capacity.note(news)
        elif isinstance(news, Failure) and not isinstance(news.error, ClosedError):
            expected = isinstance(news.error, RemoteError)
            cause = None if expected else news.error
            log.warning("an answer failed: %s", news.error, exc_info=cause)
        job.take(news)
        if not isinstance(news, Progress):
            self._leave(job)
            self._let_in()

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job in self._running or job in self._waiting:
                job.cancel()
                self._leave(job)
        self._let_in()

    def _leave(self, job: Job) -> None:
        """Give up a job's place, in the queue or with the worker."""
        if job in self._running:
            self._running.remove(job)
        else:
            self._waiting.remove(job)
        self.capacity.leave()
