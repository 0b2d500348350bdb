"""`pasta eval generate`: every method's answers to the same prompts, in as many run folders.

Without timing a method answers many prompts at once, and the methods come one after the other.
With timing nothing shares the engine: prompt by prompt every method answers alone, in an order
that is shuffled anew each turn, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from uuid import uuid4

from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.methods import Asking, Method
from pasta_decoding.evaluation.records import Record, RunFolder, Settings, failed
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import RequestScheduler

Tick = Callable[[str], None]
"""Hears the label of a method whenever a record of it is kept, those of an earlier run included."""


Clock = Callable[[], float]

FAILURES = (PastaError, RuntimeError)
"""What an engine raises if it cannot: torch and llama.cpp report a failed pass as the second."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How all methods are run.

    max_concurrency: prompts that a method answers together.
    repeats:     turns of every prompt and method where they are timed; None: they are not.
    max_seconds: one that takes longer counts as this long.
    """

    max_concurrency: int = 16
    repeats: int | None = None
    max_seconds: float = 600.0
    seed: int = 0
    retry_failed: bool = False


@dataclass(frozen=True, slots=True)
class Entrant:
    """One method to be run. `label` names its folder; `load` brings its model into memory."""

    label: str
    settings: Settings
    load: Callable[[], Method]


def generate(
    entrants: Sequence[Entrant],
    questions: Sequence[Question],
    out: Path,
    plan: Plan,
    tick: Tick,
    *,
    clock: Clock = time.perf_counter,
) -> dict[str, list[Record]]:
    """Answer what has no record yet; return each label's records, in the order of the questions.

    Raises PastaError, before anything is loaded, if a folder was begun with other settings.
    """
    folders = {
        one.label: RunFolder(out / one.label, one.settings, retry_failed=plan.retry_failed)
        for one in entrants
    }
    untimed = None if plan.repeats is None else _not_timed_together(folders.values(), questions)
    missing = {
        label: folder.missing(questions) if untimed is None else untimed
        for label, folder in folders.items()
    }
    for label, left in missing.items():
        for _ in range(len(questions) - len(left)):
            tick(label)
    if untimed is not None:
        _time(entrants, folders, untimed, plan, tick, clock)
    else:
        for one in entrants:
            _answer(one, folders[one.label], missing[one.label], plan, tick, clock)
    return {label: folder.finish(questions) for label, folder in folders.items()}


def _answer(
    one: Entrant,
    folder: RunFolder,
    missing: Sequence[Question],
    plan: Plan,
    tick: Tick,
    clock: Clock,
) -> None:
    """Let one method answer, many prompts at once."""
    if not missing:
        return
    for record in ask_all(
        one.load(),
        missing,
        max_concurrency=plan.max_concurrency,
        max_seconds=plan.max_seconds,
        clock=clock,
    ):
        folder.append(record)
        tick(one.label)


def _time(
    entrants: Sequence[Entrant],
    folders: Mapping[str, RunFolder],
    missing: Sequence[Question],
    plan: Plan,
    tick: Tick,
    clock: Clock,
) -> None:
    """Let all methods answer each prompt in turns, alone; keep the median turn."""
    if not missing:
        return
    methods = {one.label: one.load() for one in entrants}
    for method in methods.values():  # a cold engine is slow
        _alone(method, missing[0], plan, clock)
    for question in missing:
        turns: defaultdict[str, list[Record]] = defaultdict(list)
        for turn in range(plan.repeats or 1):
            for label in shuffled(list(methods), f"{plan.seed}/{question.id}/{turn}"):
                turns[label].append(_alone(methods[label], question, plan, clock))
        together = uuid4().hex[:12]
        for label, folder in folders.items():
            folder.append(replace(median_turn(turns[label]), turns=together))
            tick(label)


def _not_timed_together(
    folders: Collection[RunFolder], questions: Sequence[Question]
) -> list[Question]:
    """Return the questions that not all methods answered in the same turns.

    All answer them again, also those that have a record: its seconds are of another hour.
    """

    def turns(question: Question) -> set[str | None]:
        found = (folder.records.get(question.id) for folder in folders)
        return {None if record is None else record.turns for record in found}

    return [question for question in questions if None in (own := turns(question)) or len(own) > 1]


def _alone(method: Method, question: Question, plan: Plan, clock: Clock) -> Record:
    [record] = ask_all(
        method, [question], max_concurrency=1, max_seconds=plan.max_seconds, clock=clock
    )
    return record


def shuffled(labels: Sequence[str], key: str) -> list[str]:
    """Return the labels in an order that depends on `key` alone."""
    return Random(key).sample(labels, len(labels))


def median_turn(turns: Sequence[Record]) -> Record:
    """Return the turn of the median seconds, all turns' seconds in it; a failure if there is one.

    Of an even number of turns it is the slower one of the two in the middle, with their mean.
    """
    repeats = tuple(record.seconds for record in turns)
    for record in turns:
        if record.error is not None:
            return replace(record, repeats=repeats)
    middle = sorted(turns, key=lambda record: record.seconds)[len(turns) // 2]
    return replace(middle, seconds=median(repeats), repeats=repeats)


# Questions, several at a time: the stages of each, one after the other


def ask_all(
    method: Method,
    questions: Iterable[Question],
    *,
    max_concurrency: int = 1,
    max_seconds: float = math.inf,
    clock: Clock = time.perf_counter,
) -> Iterator[Record]:
    """Ask all questions, up to `max_concurrency` of them together; yield each record as it ends.

    A question that cannot be asked, that the engine fails in, or that takes `max_seconds` gives a
    failed record. Leaving early cancels the others.
    """
    scheduler = method.decoder.scheduler(clock=clock)
    waiting = iter(questions)
    running: list[_Conversation] = []
    try:
        while True:
            running += [
                _Conversation(question, method.ask(question), scheduler, max_seconds, clock)
                for question in islice(waiting, max_concurrency - len(running))
            ]
            if not running:
                return
            with suppress(*FAILURES):  # the conversations that it ended find out below
                scheduler.step()
            for one in list(running):
                if (record := one.advance()) is not None:
                    running.remove(one)
                    yield record
    finally:
        scheduler.close()


class _Conversation:
    """One question under way: the requests of its present stage."""

    def __init__(
        self,
        question: Question,
        asking: Asking,
        scheduler: RequestScheduler,
        max_seconds: float,
        clock: Clock,
    ) -> None:
        self._question, self._asking, self._scheduler = question, asking, scheduler
        self._max_seconds, self._clock, self._began_s = max_seconds, clock, clock()
        self._numbers: list[int] = []
        self._record = self._next_stage(None)

    def advance(self) -> Record | None:
        """Go on to the next stage if this one is over; return the record at the end."""
        if self._record is None:
            try:
                found = [self._scheduler.result(number) for number in self._numbers]
            except FAILURES as error:
                return self._failed(str(error) or type(error).__name__)
            answers = [answer for answer in found if answer is not None]
            if len(answers) == len(found):
                self._record = self._next_stage(answers)
        return self._record

    def _next_stage(self, answers: list[Answer] | None) -> Record | None:
        self._forget()
        left_s = self._max_seconds - (self._clock() - self._began_s)
        try:
            if left_s <= 0:
                raise PastaError(f"no answer within {self._max_seconds:g} s")
            stage = next(self._asking) if answers is None else self._asking.send(answers)
            limit_s = left_s if math.isfinite(left_s) else None
            for request in stage:
                number = self._scheduler.add(replace(request, max_seconds=limit_s))
                self._numbers.append(number)
        except StopIteration as over:
            record: Record = over.value
            return replace(record, seconds=self._clock() - self._began_s)
        except PastaError as error:
            return self._failed(str(error))
        return None

    def _failed(self, reason: str) -> Record:
        self._forget()
        return replace(failed(self._question, reason), seconds=self._max_seconds)

    def _forget(self) -> None:
        for number in self._numbers:
            self._scheduler.forget(number)
        self._numbers = []
