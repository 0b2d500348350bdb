"""`pasta eval generate`: every method's answers to the same prompts, in as many run folders.

Without timing a method answers many prompts at once, and the methods come one after the other.
With timing nothing shares the engine: prompt by prompt every method answers alone, in an order
that is shuffled anew each turn, so that a machine that slows down slows all of them down.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from uuid import uuid4

from pasta_decoding.data.rows import Question
from pasta_decoding.evaluation.methods import Ask, Method
from pasta_decoding.evaluation.records import Record, RunFolder, begin_run
from pasta_decoding.scheduling.asking import FAILURES, DecodingTask, ask, run_all


@dataclass(frozen=True, slots=True)
class Plan:
    """How all methods are run.

    max_concurrency: prompts that a method answers together, without timing.
    repeats:     turns of every prompt and method where they are timed; None: they are not.
    max_seconds: silence that fails an answer, which then counts as this long.
    """

    max_concurrency: int = 16
    repeats: int | None = None
    max_seconds: float = 600.0
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Job:
    """One method to be run. `label` names its folder; `load` brings its model into memory."""

    label: str
    settings: Mapping[str, Any]
    load: Callable[[], Method]


def answer_all(
    jobs: Sequence[Job],
    questions: Sequence[Question],
    out: Path,
    plan: Plan,
    tick: Callable[[int], object],
) -> dict[str, list[Record]]:
    """Answer what has no record yet; return each label's records, in the order of the questions.

    `tick` hears how many records there are more, those of an earlier run included. Raises
    PastaError, before anything is loaded, if a folder was begun with other settings.
    """
    runs = {job.label: begin_run(out / job.label, job.settings) for job in jobs}
    if plan.repeats is not None:
        untimed = [one for one in questions if not _timed_together(runs.values(), one)]
        tick((len(questions) - len(untimed)) * len(runs))
        _time(jobs, runs, untimed, plan, tick)
    else:
        for job in jobs:
            known = runs[job.label].records
            missing = [question for question in questions if question.id not in known]
            tick(len(questions) - len(missing))
            for record in ask_all(job.load(), missing, plan) if missing else ():
                runs[job.label].append(record)
                tick(1)
    return {label: run.finish(questions) for label, run in runs.items()}


def _timed_together(runs: Iterable[RunFolder], question: Question) -> bool:
    """Have all methods answered a question in the same turns?

    If not, all answer it again, also those that have a record: its seconds are of another hour.
    """
    records = [run.records.get(question.id) for run in runs]
    turns = {None if record is None else record.turns for record in records}
    return None not in turns and len(turns) == 1


def _time(
    jobs: Sequence[Job],
    runs: Mapping[str, RunFolder],
    missing: Sequence[Question],
    plan: Plan,
    tick: Callable[[int], object],
) -> None:
    """Let all methods answer each prompt in turns, alone; keep the median turn."""
    methods = {job.label: job.load() for job in jobs} if missing else {}
    for method in methods.values():  # a cold engine is slow
        list(ask_all(method, missing[:1], plan))
    for question in missing:
        turns: defaultdict[str, list[Record]] = defaultdict(list)
        for turn in range(plan.repeats or 1):
            order = Random(f"{plan.seed}/{question.id}/{turn}").sample(list(methods), len(methods))
            for label in order:
                turns[label] += ask_all(methods[label], [question], plan)
        together = uuid4().hex[:12]
        for label, run in runs.items():
            run.append(replace(median_turn(turns[label]), turns=together))
            tick(1)


def median_turn(turns: Sequence[Record]) -> Record:
    """Return the turn of the median seconds, with those of all; a failure if there is one."""
    repeats = [record.seconds for record in turns]
    for record in turns:
        if record.error is not None:
            return replace(record, repeats=repeats)
    middle = sorted(turns, key=lambda record: record.seconds)[len(turns) // 2]
    return replace(middle, seconds=median(repeats), repeats=repeats)


def ask_all(method: Method, questions: Iterable[Question], plan: Plan) -> Iterator[Record]:
    """Ask all questions, several of them together; yield each record as it ends.

    A question that cannot be asked, that the engine fails in, or that takes too long gives a record
    with an error. Leaving early cancels the others.
    """
    with closing(method.decoder.scheduler(clock=plan.clock)) as scheduler:
        answers = partial(ask, scheduler, max_seconds=plan.max_seconds, clock=plan.clock)
        asking = (_recorded(method, question, answers, plan) for question in questions)
        yield from run_all(scheduler, asking, plan.max_concurrency)


def _recorded(method: Method, question: Question, answers: Ask, plan: Plan) -> DecodingTask[Record]:
    began_s = plan.clock()
    try:
        record = yield from method.ask(question, answers)
        return replace(record, seconds=plan.clock() - began_s)
    except FAILURES as error:
        reason = str(error) or type(error).__name__
        return Record(**asdict(question), error=reason, seconds=plan.max_seconds)
