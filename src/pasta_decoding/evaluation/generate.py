"""`pasta eval generate`: every method's answers to the same prompts, in as many run folders.

Without timing a method answers many prompts at once, and the methods come one after the other.
With timing nothing shares the engine: prompt by prompt every method answers alone, in an order
that is shuffled anew each turn, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from uuid import uuid4

from pasta_decoding.data.questions import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.asking import Clock, ask_all
from pasta_decoding.evaluation.methods.base import Method
from pasta_decoding.evaluation.plan import Plan
from pasta_decoding.evaluation.records import Record, failed
from pasta_decoding.evaluation.run_folder import RunFolder, Settings

Tick = Callable[[str], None]
"""Hears the label of a method whenever a record of it is kept, those of an earlier run included."""


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
    for record in _asked(one.load(), missing, plan, clock):
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
    [record] = _asked(method, [question], plan, clock)
    return record


def _asked(
    method: Method, questions: Sequence[Question], plan: Plan, clock: Clock
) -> Iterator[Record]:
    """Let a method answer questions; yield each one's record as it ends."""
    max_concurrency = plan.max_concurrency if plan.repeats is None else 1
    for ended in ask_all(
        method.decoder,
        method.ask,
        questions,
        max_concurrency=max_concurrency,
        max_seconds=plan.max_seconds,
        clock=clock,
    ):
        record, seconds = ended.outcome, ended.seconds
        if isinstance(record, PastaError):
            record, seconds = failed(ended.question, str(record)), plan.max_seconds
        yield replace(record, seconds=seconds)


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
