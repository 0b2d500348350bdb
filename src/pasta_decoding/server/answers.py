"""Answers on their way from whoever writes them to the reply that waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.governor import Priority
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from pasta_decoding.runtime.stop_filter import Placed, StopFilter
from pasta_decoding.runtime.worker import Failure, News, Progress, Ticket
from pasta_decoding.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to be written: a choice of a request.

    choice: its index among the request's; tells answers with the same seed apart.
    stops:  the text ends before the first of these, in reading order.
    priority: how it stands to others that are written at the same time.
    """

    prompt: tuple[int, ...]
    rules: Rules
    sampling: Sampling
    choice: int = 0
    stops: tuple[str, ...] = ()
    priority: Priority = Priority.normal


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


class AnswerError(Exception):
    """An answer that was being written broke; the cause says why."""


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
        self._items: asyncio.Queue[Piece | Ended | Failure] = asyncio.Queue()

    def put(self, item: Piece | Ended | Failure) -> None:
        """Add what there is to tell. After `close` nobody listens any more."""
        self._left -= not isinstance(item, Piece)
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Piece | Ended]:
        """Yield what comes, until all answers have ended."""
        while self._left or not self._items.empty():
            item = await self._items.get()
            if isinstance(item, Failure):
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


class Job:
    """One answer from the queue to its end: what a reader sees of it, and what is counted.

    ticket: the worker's, once it has it.
    """

    def __init__(self, ask: Ask, request: Request, answers: Answers, metrics: Metrics) -> None:
        self.request = request
        self.ticket: Ticket | None = None
        self._ask = ask
        self._answers = answers
        self._metrics = metrics
        self._filter = StopFilter(ask.stops)
        self._submitted_s = time.perf_counter()
        self._shown = False

    def take(self, news: News) -> None:
        """Pass on what the worker tells."""
        match news:
            case Progress(events, step):
                self._show(events, step, self._filter.feed(events))
            case Failure():
                self._metrics.gone("failed")
                self._answers.put(news)
            case _:
                self._complete(news)

    def cancel(self) -> None:
        """Let nobody write it any more."""
        self._metrics.gone("cancelled")
        if self.ticket is not None:
            self.ticket.cancel()

    def _show(self, events: tuple[Event, ...], step: int, text: str) -> None:
        if text and not self._shown:
            self._shown = True
            self._metrics.first_text(self._age_s)
        tokens = self._filter.take_tokens()
        self._answers.put(Piece(self._ask.choice, step, events, text, tokens))

    def _complete(self, answer: Answer) -> None:
        """Show what was held back for a stop string that did not come, and tell the end."""
        reason = "length" if answer.hit_limit else "stop"
        self._metrics.answered(answer, "stop_string" if answer.stopped else reason, self._age_s)
        if rest := self._filter.finish():
            self._show((), answer.critical_path, rest)
        self._answers.put(Ended(self._ask.choice, answer))

    @property
    def _age_s(self) -> float:
        return time.perf_counter() - self._submitted_s
