"""`pasta eval generate`: every method answers the same prompts, each into its own run folder.

Without timing, a method answers many prompts together, and the methods run one after the other.
With timing, each answer has the engine to itself. Prompt by prompt, every method answers in turn,
and each turn shuffles the order of the methods: a machine that slows down slows all of them down.
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
from pasta_decoding.evaluation.ask import Ask
from pasta_decoding.evaluation.methods import Method
from pasta_decoding.evaluation.records import Record, RunFolder, begin_run
from pasta_decoding.scheduling.asking import FAILURES, DecodingTask, ask, run_all


@dataclass(frozen=True, slots=True)
class Plan:
    """How all methods are run.

    max_concurrency: prompts that a method answers together, without timing.
    repeats:     turns in which each method answers each prompt; None: answers are not timed.
    max_seconds: an answer fails if nothing is computed for this long, and then counts as this long.
    """

    max_concurrency: int = 16
    repeats: int | None = None
    max_seconds: float = 600.0
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Job:
    """One method to run. `label` names its folder; `load` loads its model."""

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
    """Answer the questions that have no record yet; return the records in order, by label.

    tick: gets the number of records that are new since its last call; first, those of an earlier
        run.

    Raises PastaError, before anything is loaded, if a folder was begun with other settings.
    """
    runs = {job.label: begin_run(out / job.label, job.settings) for job in jobs}
    if plan.repeats is None:
        for job in jobs:
            _answer_missing(job, runs[job.label], questions, plan, tick)
    else:
        missing = [
            question for question in questions if not _timed_together(runs.values(), question)
        ]
        tick((len(questions) - len(missing)) * len(runs))
        if missing:
            _time_methods(jobs, runs, missing, plan, tick)
    return {label: run.finish(questions) for label, run in runs.items()}


def _answer_missing(
    job: Job,
    run: RunFolder,
    questions: Sequence[Question],
    plan: Plan,
    tick: Callable[[int], object],
) -> None:
    missing = [question for question in questions if question.id not in run.records]
    tick(len(questions) - len(missing))
    if not missing:
        return
    for record in ask_all(job.load(), missing, plan):
        run.append(record)
        tick(1)


def _timed_together(runs: Iterable[RunFolder], question: Question) -> bool:
    """Have all methods answered a question in the same turns?

    If not, all of them answer it again. The seconds of an older record were measured at another
    time, under another load.
    """
    turns = set()
    for run in runs:
        record = run.records.get(question.id)
        turns.add(None if record is None else record.turns)
    return None not in turns and len(turns) == 1


def _time_methods(
    jobs: Sequence[Job],
    runs: Mapping[str, RunFolder],
    questions: Sequence[Question],
    plan: Plan,
    tick: Callable[[int], object],
) -> None:
    """Let all methods answer each question in turns, one at a time; keep the median turn."""
    methods = {job.label: job.load() for job in jobs}
    for method in methods.values():  # the first answer of an engine is slow: it is not kept
        list(ask_all(method, questions[:1], plan))
    for question in questions:
        turns: defaultdict[str, list[Record]] = defaultdict(list)
        for turn in range(plan.repeats or 1):
            shuffle = Random(f"{plan.seed}/{question.id}/{turn}")
            for label in shuffle.sample(list(methods), len(methods)):
                turns[label] += ask_all(methods[label], [question], plan)
        turns_id = uuid4().hex[:12]
        for label, run in runs.items():
            run.append(replace(median_turn(turns[label]), turns=turns_id))
            tick(1)


def median_turn(turns: Sequence[Record]) -> Record:
    """Return the turn of median duration, with the seconds of all turns as `repeats`.

    If a turn failed, the first failure is returned in its place.
    """
    repeats = [record.seconds for record in turns]
    for record in turns:
        if record.error is not None:
            return replace(record, repeats=repeats)
    by_duration = sorted(turns, key=lambda record: record.seconds)
    middle = by_duration[len(turns) // 2]
    return replace(middle, seconds=median(repeats), repeats=repeats)


def ask_all(method: Method, questions: Iterable[Question], plan: Plan) -> Iterator[Record]:
    """Ask questions, `plan.max_concurrency` at a time; yield each record when its answer ends.

    A question that cannot be asked, or whose answer fails or takes too long, gives a record with an
    error. Closing the iterator cancels the answers that are being written.
    """
    with closing(method.decoder.scheduler(clock=plan.clock)) as scheduler:
        decode = partial(ask, scheduler, max_seconds=plan.max_seconds, clock=plan.clock)
        tasks = (_recorded(method, question, decode, plan) for question in questions)
        yield from run_all(scheduler, tasks, plan.max_concurrency)


def _recorded(method: Method, question: Question, decode: Ask, plan: Plan) -> DecodingTask[Record]:
    """Answer a question; its record has the seconds that this took, or the error."""
    began_s = plan.clock()
    try:
        record = yield from method.ask(question, decode)
        return replace(record, seconds=plan.clock() - began_s)
    except FAILURES as error:
        reason = str(error) or type(error).__name__
        return Record(**asdict(question), error=reason, seconds=plan.max_seconds)
