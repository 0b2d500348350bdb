"""The figures of a run compared with the sequential baseline. Failures count in every figure.

- tokens per step: plain tokens / critical path of the run's own answers.
- speedup in steps: tokens of the baseline's answer / critical path, prompt by prompt.
- wall-clock speedup: seconds of the baseline's answer / seconds of the run's, if both were timed.

All three are geometric means. A failed request counts as an answer that used up its limits:
`max_tokens` steps, the seconds of its time-out, one token a step, an empty text. Prompts whose
baseline failed have no speedup; `Figures.no_baseline` counts them. Shares of chunks are of all
chunks of all answers. Shares of seams are of all answers; those of item counts, of the answers for
which `Seams` has a verdict. Intervals hold 95 % of the bootstrap resamples over prompts. All of
them share the resamples.

Shapes: P prompts, R resamples.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pasta_decoding.data.lines import read_json
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.evaluation.records import Record, RunFolder
from pasta_decoding.lang.seams import Seams, find_seams
from pasta_decoding.lang.tree import read

RESAMPLES = 10_000
_MIN_RESAMPLES = 1_000
_MAX_COUNTS = 20_000_000  # numbers in the array of resamples, 8 bytes each

TOKENS_PER_STEP = "tokens_per_step"
SPEEDUP_IN_STEPS = "speedup_in_steps"
WALL_CLOCK = "wall_clock"
LC_WIN_RATE = "lc_win_rate"
WIN_RATE = "win_rate"

RecordPairs = Sequence[tuple[Record, Record]]
"""Each prompt's record of a run, and its record of the baseline."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the interval that holds 95 % of its resamples; None if it has no value."""

    value: float | None
    low: float | None = None
    high: float | None = None


def mean(value_P: npt.ArrayLike) -> Interval:
    """Return the mean of the values that are finite, with its percentile bootstrap interval."""
    value_P = np.asarray(value_P, dtype=np.float64)
    finite_P = np.isfinite(value_P)
    if not finite_P.any():
        return Interval(None)
    value_and_count_P2 = np.stack([np.where(finite_P, value_P, 0), finite_P], axis=1)
    sum_and_count_R2 = resamples(len(value_P)) @ value_and_count_P2
    with np.errstate(invalid="ignore"):  # a resample may have no finite value
        mean_R = sum_and_count_R2[:, 0] / sum_and_count_R2[:, 1]
    low, high = np.nanpercentile(mean_R, [2.5, 97.5])
    return Interval(float(value_P[finite_P].mean()), float(low), float(high))


@lru_cache(maxsize=1)  # 50 MB at 600 prompts, and a report asks for the same counts many times
def resamples(prompts: int) -> npt.NDArray[np.float64]:
    """Return counts_RP: how often each resample holds each prompt.

    R is `RESAMPLES`; it is smaller with more than 2,000 prompts, to save memory.
    """
    fitting = _MAX_COUNTS // prompts
    size = max(_MIN_RESAMPLES, min(RESAMPLES, fitting))
    random = np.random.default_rng(0)
    counts_RP = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=size)
    return counts_RP.astype(np.float64)


def geometric_interval(ratio_P: npt.ArrayLike) -> Interval:
    """Return the geometric mean of the ratios that are not NaN."""
    log_mean = mean(np.log(ratio_P))
    return Interval(_exp(log_mean.value), _exp(log_mean.low), _exp(log_mean.high))


def _exp(logarithm: float | None) -> float | None:
    return None if logarithm is None else math.exp(logarithm)


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in figures, without the quality of its texts.

    no_baseline: prompts whose baseline failed.
    seams:       the share of answers with each seam, by the names of `lang.seams.Seams`.
    speedups:    by `TOKENS_PER_STEP`, `SPEEDUP_IN_STEPS` and, of timed runs, `WALL_CLOCK`.
    """

    prompts: int
    failures: int
    no_baseline: int
    speedups: Mapping[str, Interval]
    with_promise: Interval
    hit_limit: Interval
    plain_tokens: Interval
    chunks_mean: float
    repeated_chunks: float | None
    seams: Mapping[str, Interval]
    truncated_chunks: float | None
    interventions_per_token: float | None


def measure_run(run: RunFolder, baseline: RunFolder) -> Figures:
    """Return a run's figures. The baseline has a record of each of its prompts."""
    pairs = [(record, baseline.records[key]) for key, record in run.records.items()]
    records = list(run.records.values())
    answers = [record for record in records if record.error is None]

    def total(count: str) -> int:
        return sum(getattr(answer, count) for answer in answers)

    return Figures(
        prompts=len(records),
        failures=len(records) - len(answers),
        no_baseline=sum(base.error is not None for _, base in pairs),
        speedups=speedups(run, baseline, pairs),
        with_promise=mean([record.chunks > 0 for record in records]),
        hit_limit=mean([record.hit_limit for record in records]),
        plain_tokens=mean([record.plain_tokens for record in records]),
        chunks_mean=total("chunks") / len(records),
        repeated_chunks=_ratio(total("repeated_chunks"), total("chunks")),
        seams=_seam_shares(records),
        truncated_chunks=_ratio(total("truncated_chunks"), total("chunks")),
        interventions_per_token=_ratio(total("interventions"), total("fed_tokens")),
    )


def _seam_shares(records: Sequence[Record]) -> dict[str, Interval]:
    seams = [find_seams(record.instruction, read(record.annotated)) for record in records]
    shares = {}
    for seam in fields(Seams):
        verdicts = [getattr(seams_of_answer, seam.name) for seams_of_answer in seams]
        shares[seam.name] = mean([math.nan if verdict is None else verdict for verdict in verdicts])
    return shares


def speedups(run: RunFolder, baseline: RunFolder, pairs: RecordPairs) -> dict[str, Interval]:
    """Return each speedup. Raises PastaError if both runs were timed, but not in the same turns."""
    failure_steps = run.settings["max_tokens"]
    in_steps = [_speedup_in_steps(record, base, failure_steps) for record, base in pairs]
    intervals = {
        TOKENS_PER_STEP: geometric_interval([record.tokens_per_step for record, _ in pairs]),
        SPEEDUP_IN_STEPS: geometric_interval(in_steps),
    }
    timed = all(record.turns is not None and base.turns is not None for record, base in pairs)
    if timed:
        if any(record.turns != base.turns for record, base in pairs):
            raise PastaError(
                f"{run.folder} and {baseline.folder} were not timed together",
                hint="Give both methods to one `pasta eval generate --timing`, to time again.",
            )
        in_seconds = [_wall_clock_speedup(record, base) for record, base in pairs]
        intervals[WALL_CLOCK] = geometric_interval(in_seconds)
    return intervals


def _speedup_in_steps(record: Record, base: Record, failure_steps: int) -> float:
    """Return a prompt's speedup; NaN if its baseline failed."""
    if base.error is not None:
        return math.nan
    steps = record.critical_path if record.error is None else failure_steps
    return max(1, base.plain_tokens) / max(1, steps)


def _wall_clock_speedup(record: Record, base: Record) -> float:
    """Return a prompt's speedup; NaN if its baseline failed. Raises PastaError without seconds."""
    for timed_record in (record, base):
        if not timed_record.seconds > 0:
            raise PastaError(f"the record {record.id} has no seconds: {timed_record.seconds}")
    return math.nan if base.error is not None else base.seconds / record.seconds


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


# Files that the package alpaca_eval writes into a run folder: runs/pasta/NAME/annotations.json and
# leaderboard.csv. A preference of 1 is for the reference's answer, of 2 for the model's.


@dataclass(frozen=True, slots=True)
class Verdicts:
    """How alpaca_eval's annotator judged a run's answers against a reference's.

    annotator:   "" without verdicts.
    preferences: from 0 to 1 for the run, by the prompt's id; NaN without a verdict.
    win_rates:   in percent. `LC_WIN_RATE` and its standard error are alpaca_eval's, if it computed
                 them. `WIN_RATE` is the mean preference of the prompts that have a verdict: a
                 missing verdict is no tie.
    """

    annotator: str = ""
    preferences: Mapping[str, float] = field(default_factory=dict)
    win_rates: Mapping[str, Interval] = field(default_factory=dict)
    # Shares of the prompts that have a verdict, of a judge that read both orders; else None.
    ties: float | None = None
    agreement: float | None = None


def verdicts_of(run: RunFolder, baseline: RunFolder) -> Verdicts:
    """Read alpaca_eval's files in a run folder. Raises PastaError if they judge other answers."""
    paths = sorted(run.folder.glob("**/annotations.json"))
    if len(paths) > 1:
        raise PastaError(f"{run.folder} holds annotations of several judges: keep one of {paths}")
    if not paths or run is baseline:
        return Verdicts()
    [path] = paths
    preferences = dict.fromkeys(run.records, math.nan)
    ids = {record.instruction: key for key, record in run.records.items()}
    annotators = set()
    malformed = (KeyError, TypeError, ValueError, AttributeError)
    with errors_as(f"{path}: not alpaca_eval's annotations", *malformed):
        for annotation in read_json(path, list):
            prompt_id = ids.get(annotation["instruction"])
            if prompt_id is None:
                continue
            _refuse_other_answers(path, annotation, prompt_id, run, baseline)
            preferences[prompt_id] = _preference(path, annotation)
            annotators.add(str(annotation["annotator"]))
    percentages = [100 * preference for preference in preferences.values()]
    win_rates = {WIN_RATE: mean(percentages)}
    win_rates |= _length_controlled(path.with_name("leaderboard.csv"), run.label)
    return Verdicts(", ".join(sorted(annotators)), preferences, win_rates)


def _refuse_other_answers(
    path: Path, annotation: Mapping[str, Any], prompt_id: str, run: RunFolder, baseline: RunFolder
) -> None:
    judged_texts = [annotation["output_1"].strip(), annotation["output_2"].strip()]
    texts = [folder.records[prompt_id].text.strip() for folder in (baseline, run)]
    if judged_texts != texts:
        raise PastaError(
            f"{path} is of other answers to {annotation['instruction'][:60]!r} than "
            f"{baseline.folder} and {run.folder} hold: run alpaca_eval again"
        )


def _preference(path: Path, annotation: Mapping[str, Any]) -> float:
    """Return the preference for the run, from 0 to 1; NaN if the annotator had none."""
    if annotation["preference"] is None:
        return math.nan
    preference = float(annotation["preference"]) - 1
    if preference < 0 or preference > 1:
        raise PastaError(f"{path}: the preference {annotation['preference']} is not in [1, 2]")
    return preference


def _length_controlled(path: Path, label: str) -> dict[str, Interval]:
    """Return a run's length-controlled win rate from a leaderboard, if the rate is there."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    with errors_as(f"{path}: not alpaca_eval's leaderboard", csv.Error, KeyError, ValueError):
        for row in csv.DictReader(text.splitlines()):
            model_name = next(iter(row.values()))
            if model_name != label or not row.get("length_controlled_winrate"):
                continue
            win_rate = float(row["length_controlled_winrate"])
            margin = 1.96 * float(row["lc_standard_error"])
            if 0 < margin < math.inf:
                return {LC_WIN_RATE: Interval(win_rate, win_rate - margin, win_rate + margin)}
            return {LC_WIN_RATE: Interval(win_rate)}
    return {}
