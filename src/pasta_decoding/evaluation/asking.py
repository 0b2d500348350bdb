"""Questions to a model, several at a time: the stages of each, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic

from pasta_decoding.data.questions import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.methods.base import Asking, Outcome
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder, RequestScheduler

Clock = Callable[[], float]

FAILURES = (PastaError, RuntimeError)
"""What an engine raises where it cannot: torch and llama.cpp report a failed pass as the second."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[Outcome]):
    """What became of a question, or why there is nothing, and how long it took."""

    question: Question
    outcome: Outcome | PastaError
    seconds: float


def ask_all(
    decoder: Decoder,
    ask: Callable[[Question], Asking[Outcome]],
    questions: Iterable[Question],
    *,
    max_concurrency: int,
    max_seconds: float | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Ended[Outcome]]:
    """Ask all questions, up to `max_concurrency` of them together; yield each as it ends.

    One that cannot be asked, that the engine fails in, or that takes `max_seconds` ends with its
    error. Leaving early cancels the others.
    """
    scheduler = decoder.scheduler(clock=clock)
    waiting = iter(questions)
    running: list[_Talk[Outcome]] = []
    try:
        while True:
            running += [
                _Talk(question, ask(question), scheduler, max_seconds, clock)
                for question in islice(waiting, max_concurrency - len(running))
            ]
            if not running:
                return
            with suppress(*FAILURES):  # the questions that it ended tell of it below
                scheduler.step()
            for talk in list(running):
                if (ended := talk.advance()) is not None:
                    running.remove(talk)
                    yield ended
    finally:
        scheduler.close()


@dataclass
class _Talk(Generic[Outcome]):
    """One question under way: the requests of its present stage."""

    question: Question
    asking: Asking[Outcome]
    scheduler: RequestScheduler
    max_seconds: float | None
    clock: Clock
    numbers: list[int] = field(default_factory=list)
    ended: Ended[Outcome] | None = None

    def __post_init__(self) -> None:
        self.began_s = self.clock()
        self._go_on(None)

    def advance(self) -> Ended[Outcome] | None:
        """Go on to the next stage if this one is over; return what became of it at the end."""
        if self.ended is None:
            try:
                answers = self._answers()
            except FAILURES as error:
                self._end(PastaError(str(error) or type(error).__name__))
            else:
                if answers is not None:
                    self._go_on(answers)
        return self.ended

    def _answers(self) -> list[Answer] | None:
        """Return the answers of the stage; None while one is being written."""
        found = [self.scheduler.result(number) for number in self.numbers]
        answers = [answer for answer in found if answer is not None]
        return answers if len(answers) == len(found) else None

    def _go_on(self, answers: list[Answer] | None) -> None:
        self._forget()
        try:
            left_s = self._left()
            stage = next(self.asking) if answers is None else self.asking.send(answers)
            requests = [replace(request, max_seconds=left_s) for request in stage]
            self.numbers = self.scheduler.add_together(requests)
        except StopIteration as over:
            self._end(over.value)
        except PastaError as error:
            self._end(error)

    def _left(self) -> float | None:
        """Return how many seconds are left. Raises PastaError if there are none."""
        if self.max_seconds is None:
            return None
        left_s = self.max_seconds - (self.clock() - self.began_s)
        if left_s <= 0:
            raise PastaError(f"no answer within {self.max_seconds:g} s")
        return left_s

    def _end(self, outcome: Outcome | PastaError) -> None:
        self._forget()
        self.ended = Ended(self.question, outcome, self.clock() - self.began_s)

    def _forget(self) -> None:
        for number in self.numbers:
            self.scheduler.forget(number)
        self.numbers = []
