"""How often the answers of runs do what their prompts ask, with paired intervals.

- passed:      answers that pass all checks of their prompt, of the prompts that have some.
- promised:    answers with a promise, of the prompts whose answer should be plain.
- synced:      answers with a sync, of the prompts that need one;
- used:        those whose text behind it names or uses a part (data/syncs.py);
- right:       those whose text behind it holds what a right answer's must.
- idle_synced: answers with a sync, of the prompts that need none.

A failed request has passed nothing and written no tag. Intervals as in evaluation/figures.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pasta_decoding.data.asked import Asked
from pasta_decoding.data.dataset import Row
from pasta_decoding.data.syncs import text_behind_sync, uses_parts
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import Drawn, Interval
from pasta_decoding.evaluation.figures import mean
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import MethodRun, same_prompts
from pasta_decoding.lang.tree import Sync, read

Verdict = Callable[[Asked, Record], bool | None]
"""What a figure says of one answer; None where it has nothing to say of such a prompt."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a run's answers, and the run's less the baseline's; None for the baseline."""

    prompts: int
    share: Interval
    difference: Interval | None


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A prompt's answer that could not be looked at, or counts as failed, and why."""

    run: str
    prompt: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of runs, by their labels; of a run by figure, and its checks by kind."""

    baseline: str
    shares: Mapping[str, Mapping[str, Share]]
    kinds: Mapping[str, Mapping[str, Share]]
    not_checked: Sequence[NotChecked]


def check_runs(runs: Sequence[MethodRun], baseline: MethodRun, asked: Sequence[Asked]) -> Checked:
    """Look at the answers of all runs to the prompts asked; those without an answer are named.

    Raises PastaError if the runs are of different prompts, or have none of these.
    """
    reference, *others = same_prompts([baseline, *runs])
    known = [one for one in asked if one.id in reference.records]
    if not known:
        hint = "Give --prompts the file that `pasta eval generate` was given."
        raise PastaError(f"{reference.folder} answers none of the {len(asked)} prompts", hint=hint)
    by_kind = {kind: _passes(kind) for kind in _kinds(known)}
    return Checked(
        reference.label,
        {run.label: _shares(run, reference, known, FIGURES) for run in others},
        {run.label: _shares(run, reference, known, by_kind) for run in others},
        [one for run in others for one in _not_checked(run, asked)],
    )


def sound_rows(
    runs: Sequence[MethodRun], asked: Sequence[Asked], per_prompt: int | None = None
) -> list[Row]:
    """Return the answers that `train sft` may learn from, as rows, prompt by prompt.

    They ended by themselves and are sound (`Asked.is_sound`). Of a prompt's at most `per_prompt`:
    those with most plain tokens a step, each text once.
    """
    return [row for one in asked for row in _sound_rows_of(runs, one)[:per_prompt]]


def _sound_rows_of(runs: Sequence[MethodRun], asked: Asked) -> list[Row]:
    """Return a row for each sound answer to a prompt, the fastest first."""
    found: dict[str, tuple[float, Row]] = {}
    for run in runs:
        record = run.records.get(asked.id)
        if record is not None and record.annotated not in found and _is_sound(asked, record):
            row = Row(f"{run.label}-{asked.name}", run.label, asked.instruction, record.annotated)
            found[record.annotated] = record.own_speedup, row
    return [row for _, row in sorted(found.values(), key=lambda one: -one[0])]


def _is_sound(asked: Asked, record: Record) -> bool:
    """Is it sound, and did it and all its chunks end by themselves?"""
    ended = record.error is None and not record.hit_limit and not record.truncated_chunks
    return ended and asked.is_sound(read(record.annotated))


def _shares(
    run: MethodRun, baseline: MethodRun, asked: Sequence[Asked], figures: Mapping[str, Verdict]
) -> dict[str, Share]:
    """Return those figures that have something to say of the prompts."""
    found = {}
    for name, verdict in figures.items():
        prompts = sum(verdict(one, run.records[one.id]) is not None for one in asked)
        if prompts:
            own, other = (_drawn(side, asked, verdict) for side in (run, baseline))
            is_baseline = run.folder.resolve() == baseline.folder.resolve()
            difference = None if is_baseline else own.minus(other).interval()
            found[name] = Share(prompts, own.interval(), difference)
    return found


def _drawn(run: MethodRun, asked: Sequence[Asked], verdict: Verdict) -> Drawn:
    said = [verdict(one, run.records[one.id]) for one in asked]
    return mean(np.array([math.nan if one is None else float(one) for one in said]))


def _not_checked(run: MethodRun, asked: Sequence[Asked]) -> list[NotChecked]:
    found = []
    for one in asked:
        record = run.records.get(one.id)
        if record is None:
            found.append(NotChecked(run.label, one.name, "has no answer yet, and does not count"))
        elif record.error is not None:
            found.append(NotChecked(run.label, one.name, f"failed: {record.error}"))
    return found


# Verdicts


def _passed(asked: Asked, record: Record) -> bool | None:
    return all(one.passes(record.text) for one in asked.checks) if asked.checks else None


def _passes(kind: str) -> Verdict:
    """Return the verdict on an answer's checks of one kind."""

    def verdict(asked: Asked, record: Record) -> bool | None:
        checks = [one for one in asked.checks if one.kind == kind]
        return all(one.passes(record.text) for one in checks) if checks else None

    return verdict


def _kinds(asked: Sequence[Asked]) -> list[str]:
    return sorted({check.kind for one in asked for check in one.checks})


def _promised(asked: Asked, record: Record) -> bool | None:
    return record.chunks > 0 if asked.plain else None


def _synced(asked: Asked, record: Record) -> bool | None:
    return _has_sync(record) if asked.needs_sync else None


def _used(asked: Asked, record: Record) -> bool | None:
    return uses_parts(read(record.annotated), asked.instruction) if asked.needs_sync else None


def _right(asked: Asked, record: Record) -> bool | None:
    if not asked.needs_sync or asked.behind is None:
        return None
    return asked.behind.holds(text_behind_sync(read(record.annotated)))


def _idle_synced(asked: Asked, record: Record) -> bool | None:
    return _has_sync(record) if asked.needs_sync is False else None


def _has_sync(record: Record) -> bool:
    return any(isinstance(node, Sync) for node in read(record.annotated))


FIGURES: Mapping[str, Verdict] = {
    "passed": _passed,
    "promised": _promised,
    "synced": _synced,
    "used": _used,
    "right": _right,
    "idle_synced": _idle_synced,
}
