"""The figures of a run against the sequential one, failures inside every one of them.

- own, theoretical, wall-clock speedup: see lang/measures.py and `speeds`; geometric means. Per
  token is wall-clock between seconds over the plain tokens of each answer, where a shorter one
  gains nothing.
- a failed request counts as an answer that used up its budget: `max_tokens` steps and the seconds
  of its time-out for nothing; its own speedup is 1, its text is empty.
- a prompt whose baseline failed has no theoretical and no wall-clock speedup; these are counted.
- a share is of all that there is: of the chunks of all answers, say.

Intervals hold 95 % of the bootstrap resamples over prompts. All figures of a report are drawn with
the same resamples, so differences between runs are paired.

Shapes: P prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import Drawn, FloatArray, Interval, drawn
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import MethodRun
from pasta_decoding.lang.measures import (
    bucket_shares,
    empty_items,
    own_speedup,
    rep_4,
    stock_topics,
)
from pasta_decoding.lang.tree import read

OWN, THEORETICAL, WALL_CLOCK, PER_TOKEN = "own", "theoretical", "wall_clock", "per_token"
BOTH_ENDED = "both ended"
# Bins by the tokens of the baseline's answer, so that every run has the same prompts in a bin.
LENGTHS = (0, 50, 100, 200, 400)


@dataclass(frozen=True, slots=True)
class RecordPair:
    """A run and the sequential run, of the same prompts in the same order."""

    run: MethodRun
    baseline: MethodRun

    @property
    def records(self) -> list[tuple[Record, Record]]:
        """Each prompt's record of the run and of the baseline."""
        return [(record, self.baseline.records[key]) for key, record in self.run.records.items()]


@dataclass(frozen=True, slots=True)
class Bin:
    """The speedups of some of the prompts."""

    prompts: int
    speedups: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a run without looking at the quality of its texts.

    no_baseline:   prompts whose baseline failed.
    by_end:        by which answer ended by itself, the run's or the baseline's.
    speedups:      by the names above; the last two only where both runs were timed.
    threads:       live ones of a step, the mean over all steps of all answers.
    empty_scaffolds: answers with an empty item.
    near_promises, promised_ratio, buckets: of all chunks that ended by themselves, how many have
                   about the promised length; written / promised tokens; the share of each length.
    rep_4:         the mean over all answers.
    stock_topics:  of all topics, see lang/measures.py.
    first_text_s, last_text_s: medians over the answers; None unless the run was timed.
    """

    prompts: int
    failures: int
    no_baseline: int
    speedups: Mapping[str, Interval]
    by_length: Mapping[str, Bin]
    by_dataset: Mapping[str, Bin]
    by_end: Mapping[str, Bin]
    with_promise: Interval
    hit_limit: Interval
    empty_scaffolds: Interval
    chunks_mean: float
    syncs_mean: float
    threads: float | None
    plain_tokens_mean: float
    near_promises: float | None
    promised_ratio: float | None
    buckets: Mapping[int, float]
    rep_4: float | None
    repeated_chunks: float | None
    stock_topics: float | None
    truncated_chunks: float | None
    interventions_per_token: float | None
    first_text_s: float | None
    last_text_s: float | None


def figures(pair: RecordPair) -> Figures:
    """Return the figures of a run."""
    records = list(pair.run.records.values())
    answers = [record for record in records if record.error is None]
    promises = [promise for record in answers for promise in record.promises]
    chunks = sum(record.chunks for record in answers)
    widths = total_widths(answers)
    timed = bool(answers) and all(record.turns is not None for record in answers)
    return Figures(
        prompts=len(records),
        failures=len(records) - len(answers),
        no_baseline=sum(base.error is not None for _, base in pair.records),
        speedups={name: geometric(log_P).interval() for name, log_P in speeds(pair).items()},
        by_length=_bins(pair, lambda _record, base: _length_bin(base)),
        by_dataset=_bins(pair, lambda record, _base: record.dataset),
        by_end=_bins(pair, _how_ended),
        with_promise=share([record.chunks > 0 for record in records]),
        hit_limit=share([record.hit_limit for record in records]),
        empty_scaffolds=share([empty_items(record.text) > 0 for record in records]),
        chunks_mean=chunks / len(records),
        syncs_mean=sum(record.syncs for record in answers) / len(records),
        threads=_ratio(sum(w * steps for w, steps in widths.items()), sum(widths.values())),
        plain_tokens_mean=sum(record.plain_tokens for record in answers) / len(records),
        near_promises=_ratio(sum(record.near_promises for record in answers), len(promises)),
        promised_ratio=_ratio(sum(b for _, b in promises), sum(a for a, _ in promises)),
        buckets=bucket_shares(promised for promised, _ in promises),
        rep_4=_ratio(sum(rep_4(record.text) for record in answers), len(answers)),
        repeated_chunks=_ratio(sum(record.repeated_chunks for record in answers), chunks),
        stock_topics=stock_topics((one.instruction, read(one.annotated)) for one in answers),
        truncated_chunks=_ratio(sum(record.truncated_chunks for record in answers), chunks),
        interventions_per_token=_ratio(
            sum(record.interventions for record in answers), sum(r.fed_tokens for r in answers)
        ),
        first_text_s=_median([record.first_text_s for record in answers]) if timed else None,
        last_text_s=_median([record.last_text_s for record in answers]) if timed else None,
    )


# Speed


def speeds(pair: RecordPair) -> dict[str, FloatArray]:
    """Return the log of each speedup, prompt by prompt; NaN where a prompt has none.

    Raises PastaError if both runs were timed, but not in the same turns.
    """
    own = [_own(record) for record, _ in pair.records]
    theoretical = [_theoretical(record, base, pair.run.max_tokens) for record, base in pair.records]
    found = {OWN: own, THEORETICAL: theoretical}
    if all(record.turns is not None for both in pair.records for record in both):
        if any(record.turns != base.turns for record, base in pair.records):
            raise PastaError(
                f"{pair.run.folder} and {pair.baseline.folder} were not timed together",
                hint="Give both methods to one `pasta eval generate --timing`, to time again.",
            )
        found[WALL_CLOCK] = [_wall_clock(record, base) for record, base in pair.records]
        found[PER_TOKEN] = [
            ratio * max(1, record.plain_tokens) / max(1, base.plain_tokens)
            for ratio, (record, base) in zip(found[WALL_CLOCK], pair.records, strict=True)
        ]
    return {name: np.log(ratios) for name, ratios in found.items()}


def _own(record: Record) -> float:
    return own_speedup(record.plain_tokens, record.critical_path) if record.error is None else 1.0


def _theoretical(record: Record, base: Record, max_tokens: int) -> float:
    if base.error is not None:
        return math.nan
    steps = record.critical_path if record.error is None else max_tokens
    return max(1, base.plain_tokens) / max(1, steps)


def _wall_clock(record: Record, base: Record) -> float:
    for one in (record, base):
        if not one.seconds > 0:
            hint = "A failed request must say its time-out in `seconds`."
            raise PastaError(f"the record {one.id} has no seconds: {one.seconds}", hint=hint)
    return math.nan if base.error is not None else base.seconds / record.seconds


def geometric(log_P: FloatArray, chosen_P: Sequence[bool] | None = None) -> Drawn:
    """Return the geometric mean of ratios whose logs are given; NaN ones do not count."""
    known_P = np.isfinite(log_P)
    if chosen_P is not None:
        known_P &= np.asarray(chosen_P)
    rows_PF = np.stack([np.where(known_P, log_P, 0), known_P], axis=1)
    return drawn(rows_PF, lambda sums: np.exp(sums[..., 0] / sums[..., 1]))


def mean(value_P: FloatArray) -> Drawn:
    """Return the mean of what is not NaN."""
    known_P = np.isfinite(value_P)
    rows_PF = np.stack([np.where(known_P, value_P, 0), known_P], axis=1)
    return drawn(rows_PF, lambda sums: sums[..., 0] / sums[..., 1])


def share(which_P: Sequence[bool]) -> Interval:
    """Return the share of prompts for which something holds."""
    return mean(np.array(which_P, dtype=np.float64)).interval()


# Parts of the prompts


def _bins(pair: RecordPair, name: Callable[[Record, Record], str | None]) -> dict[str, Bin]:
    """Return the speedups of the prompts of each name, in order of appearance."""
    names = [name(record, base) for record, base in pair.records]
    found = speeds(pair)
    bins = {}
    for one in sorted({known for known in names if known is not None}, key=_bin_order):
        chosen = [other == one for other in names]
        speedups = {key: geometric(log_P, chosen).interval() for key, log_P in found.items()}
        bins[one] = Bin(sum(chosen), speedups)
    return bins


def _length_bin(base: Record) -> str | None:
    if base.error is not None:
        return None
    tokens = base.plain_tokens
    low = max(start for start in LENGTHS if start <= tokens)
    higher = [start for start in LENGTHS if start > tokens]
    return f"{low} to {higher[0] - 1}" if higher else f"{low} and more"


def _how_ended(record: Record, base: Record) -> str:
    """Return which of the two answers ended by itself; a failed one did not."""
    ended, base_ended = (one.error is None and not one.hit_limit for one in (record, base))
    if ended:
        return BOTH_ENDED if base_ended else "only the run's ended"
    return "only the baseline's ended" if base_ended else "none ended"


def _bin_order(name: str) -> tuple[int, str]:
    start = name.partition(" ")[0]
    return (int(start) if start.isdigit() else 0, name)


def total_widths(records: Sequence[Record]) -> Counter[int]:
    """Return how many steps of all answers had how many live threads."""
    found: Counter[int] = Counter()
    for record in records:
        found.update(record.widths)
    return found


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
