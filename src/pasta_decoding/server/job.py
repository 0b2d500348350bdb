"""One answer on its way through a backend, from the queue to its end, whoever writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.stop_filter import StopFilter
from pasta_decoding.server.backend import Answers, Ended, Failed, Piece
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.questions import Ask


class Job:
    """What is to be written, what a reader has seen of it, and what the metrics are told."""

    def __init__(self, ask: Ask, request: Request, answers: Answers, metrics: Metrics) -> None:
        self.request = request
        self.answers = answers
        self._ask = ask
        self._metrics = metrics
        self._filter = StopFilter(ask.stops)
        self._submitted_s = time.perf_counter()
        self._shown = False

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted."""
        return time.perf_counter() - self._submitted_s

    def piece(self, events: Sequence[Event], step: int) -> Piece:
        """Return what a step brought."""
        return self._piece(tuple(events), step, self._filter.feed(events))

    def complete(self, answer: Answer) -> list[Piece | Ended]:
        """Return what was held back for a stop string that did not come, and the end."""
        reason = "length" if answer.hit_limit else "stop"
        self._metrics.answered(answer, "stop_string" if answer.stopped else reason, self.age_s)
        rest = self._filter.finish()
        pieces = [self._piece((), answer.critical_path, rest)] if rest else []
        return [*pieces, Ended(self._ask.choice, answer)]

    def fail(self, error: BaseException) -> Failed:
        """Return the end of an answer that will not come."""
        self._metrics.gone("failed")
        return Failed(error)

    def cancel(self) -> None:
        """Note that nobody wants it any more."""
        self._metrics.gone("cancelled")

    def _piece(self, events: tuple[Event, ...], step: int, text: str) -> Piece:
        if text and not self._shown:
            self._shown = True
            self._metrics.first_text(self.age_s)
        return Piece(self._ask.choice, step, events, text, self._filter.take_tokens())
