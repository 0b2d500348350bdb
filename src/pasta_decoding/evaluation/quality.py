"""How good the answers of a run are against the sequential ones, by every measure there is.

- lc_win_rate, win_rate: see eval/win_rate.py; from annotations.json.
- text_quality: the answer's text quality less that of the baseline's answer (lang/measures.py).
- likelihood: nats per token of the baseline's answer less those of the answer, repetition and all.

The last two are from quality.jsonl and need no judge, but know nothing of truth or usefulness. A
greedy baseline is ahead in both by construction: it wrote what that very model finds likeliest.
An empty answer, as a failed request has it, counts in all of them: it loses to every answer, and
has the likelihood of an answer that ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import Drawn, FloatArray, Interval
from pasta_decoding.evaluation.figures import RecordPair, mean
from pasta_decoding.evaluation.runs import MethodRun, TextQuality, text_digest
from pasta_decoding.evaluation.win_rate import Verdicts, length_controlled, win_rate
from pasta_decoding.lang.measures import text_quality

LC_WIN_RATE, WIN_RATE = "lc_win_rate", "win_rate"
TEXT_QUALITY, LIKELIHOOD = "text_quality", "likelihood"
EQUAL = {LC_WIN_RATE: 50.0, WIN_RATE: 50.0, TEXT_QUALITY: 0.0, LIKELIHOOD: 0.0}
"""The value of each measure for a run that is as good as the baseline."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A run by one measure.

    missing: prompts without a verdict or a rating; they are in none of the figures.
    by:      who judged, or which model.
    """

    drawn: Drawn
    interval: Interval
    rated: int
    missing: int
    by: str


@dataclass(frozen=True, slots=True)
class Faults:
    """What parallel writing breaks, counted in the texts of the run and of the baseline."""

    rep_4: float
    baseline_rep_4: float
    missing_topics: float | None


def qualities(pair: RecordPair) -> dict[str, Quality]:
    """Return what is known of a run's quality, by measure. Raises PastaError for stale ratings."""
    check_ratings(pair)
    return {**_by_verdicts(pair), **_by_texts(pair)}


def check_ratings(pair: RecordPair) -> None:
    """Raise a PastaError if other answers were rated than the run and the baseline hold now."""
    for record, base in pair.records:
        row, verdict = pair.run.quality.get(record.id), pair.run.annotations.get(record.id)
        fresh: list[tuple[MethodRun, bool]] = []
        if row is not None:
            fresh += [
                (pair.run, row.answer == text_digest(record.text)),
                (pair.baseline, row.baseline_answer == text_digest(base.text)),
            ]
        if verdict is not None:
            fresh += [
                (pair.run, verdict.output_2.strip() == record.text.strip()),
                (pair.baseline, verdict.output_1.strip() == base.text.strip()),
            ]
        if stale := [run for run, is_fresh in fresh if not is_fresh]:
            other = f"another answer to {record.instruction[:60]!r} than {stale[0].folder} holds"
            message = f"{pair.run.folder} was rated with {other}"
            raise PastaError(message, hint="Rate the run again with `pasta eval rate`.")


def faults(pair: RecordPair) -> Faults | None:
    """Return the faults of a run's texts; None if it was not rated."""
    rows = [row for key in pair.run.records if (row := pair.run.quality.get(key))]
    if not rows:
        return None
    topics = sum(row.topics for row in rows)
    return Faults(
        rep_4=float(np.mean([row.rep_4 for row in rows])),
        baseline_rep_4=float(np.mean([row.baseline_rep_4 for row in rows])),
        missing_topics=sum(row.missing_topics for row in rows) / topics if topics else None,
    )


def _by_verdicts(pair: RecordPair) -> dict[str, Quality]:
    if not pair.run.annotations or pair.run is pair.baseline:
        return {}
    verdicts = verdicts_of(pair)
    by = ", ".join(sorted({one.annotator for one in pair.run.annotations.values()}))
    formula = "minimal" if verdicts.difficulty_P is None else "noreg"
    found = {
        LC_WIN_RATE: (length_controlled(verdicts), f"{by}; length_controlled_{formula}"),
        WIN_RATE: (win_rate(verdicts), by),
    }
    return {
        name: Quality(one, one.interval(), verdicts.judged, verdicts.missing, how)
        for name, (one, how) in found.items()
    }


def verdicts_of(pair: RecordPair) -> Verdicts:
    """Return what the annotations say; difficulties only if those of all prompts are known."""
    rows = [pair.run.annotations.get(key) for key in pair.run.records]
    preferences = [
        math.nan if row is None or row.preference is None else row.preference - 1 for row in rows
    ]
    longer = [len(base.text) - len(record.text) for record, base in pair.records]
    difficulties = [
        row.difficulty for row in rows if row is not None and row.difficulty is not None
    ]
    return Verdicts(
        np.array(preferences, dtype=np.float64),
        np.array(longer, dtype=np.float64),
        np.array(difficulties) if len(difficulties) == len(rows) else None,
    )


def _by_texts(pair: RecordPair) -> dict[str, Quality]:
    if not pair.run.quality or pair.run is pair.baseline:
        return {}
    by = str(pair.run.rating.get("likelihood_under", "sequential"))
    measures: Mapping[str, Callable[[TextQuality], float]] = {
        TEXT_QUALITY: _gain,
        LIKELIHOOD: lambda row: row.baseline_nats - row.nats,
    }
    found = {}
    for name, measure in measures.items():
        value_P = _values(pair, measure)
        one, missing = mean(value_P), int(np.isnan(value_P).sum())
        found[name] = Quality(one, one.interval(), len(value_P) - missing, missing, by)
    return found


def _values(pair: RecordPair, measure: Callable[[TextQuality], float]) -> FloatArray:
    rows = [pair.run.quality.get(key) for key in pair.run.records]
    return np.array([math.nan if row is None else measure(row) for row in rows])


def _gain(row: TextQuality) -> float:
    baseline = text_quality(row.baseline_nats, row.baseline_rep_4)
    return text_quality(row.nats, row.rep_4) - baseline
