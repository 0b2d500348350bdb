"""The figures of a run against the sequential baseline, failures inside every one of them.

- tokens per step: plain tokens / critical path of the run's own answers.
- speedup in steps: tokens of the baseline's answer / critical path, prompt by prompt.
- wall-clock speedup: seconds of the baseline's answer / seconds of the run's, if both were timed.

All three are geometric means. A failed request counts as an answer that used up its budget:
`max_tokens` steps, the seconds of its time-out, one token a step, an empty text. Prompts whose
baseline failed have no speedup, and are counted. Shares are of all chunks of all answers; those of
seams are of all prompts, and for item counts of the prompts where `Seams` has a verdict. Intervals
hold 95 % of the bootstrap resamples over prompts, the same for all figures.

Shapes: P prompts, R resamples.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pasta_decoding.data.lines import read_json
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.evaluation.records import Record, RunFolder
from pasta_decoding.lang.seams import Seams, find_seams
from pasta_decoding.lang.tree import read

RESAMPLES, _MIN_RESAMPLES, _MAX_COUNTS = 10_000, 1_000, 20_000_000
TOKENS_PER_STEP, SPEEDUP_IN_STEPS, WALL_CLOCK = "tokens_per_step", "speedup_in_steps", "wall_clock"
LC_WIN_RATE, WIN_RATE = "lc_win_rate", "win_rate"
Pairs = Sequence[tuple[Record, Record]]
"""Each prompt's record of a run and of the baseline."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the interval that holds 95 % of its resamples; None if it has no value."""

    value: float | None
    low: float | None = None
    high: float | None = None


def mean(value_P: npt.ArrayLike) -> Interval:
    """Return the mean of the values that are not NaN, with its percentile bootstrap interval."""
    found_P = np.asarray(value_P, dtype=np.float64)
    known_P = np.isfinite(found_P)
    if not known_P.any():
        return Interval(None)
    rows_P2 = np.stack([np.where(known_P, found_P, 0), known_P], axis=1)
    sums_R2 = resamples(len(found_P)) @ rows_P2
    with np.errstate(invalid="ignore"):  # a resample may hold no known value
        draws_R = sums_R2[:, 0] / sums_R2[:, 1]
    value = float(found_P[known_P].mean())
    return Interval(value, *map(float, np.nanpercentile(draws_R, [2.5, 97.5])))


@lru_cache(maxsize=1)  # 50 MB at 600 prompts, and a report asks for the same ones again and again
def resamples(prompts: int) -> npt.NDArray[np.float64]:
    """Return counts_RP: how often each resample holds each prompt; all that its sums depend on.

    R is `RESAMPLES`; fewer for more than 2,000 prompts, which would take over 160 MB.
    """
    resampled = max(_MIN_RESAMPLES, min(RESAMPLES, _MAX_COUNTS // prompts))
    draw = np.random.default_rng(0)
    counts_RP = draw.multinomial(prompts, np.full(prompts, 1 / prompts), size=resampled)
    return counts_RP.astype(np.float64)


def geometric(ratio_P: npt.ArrayLike) -> Interval:
    """Return the geometric mean of the ratios that are not NaN."""
    of_logs = astuple(mean(np.log(ratio_P)))
    return Interval(*(None if one is None else math.exp(one) for one in of_logs))


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in figures, without the quality of its texts.

    no_baseline: prompts whose baseline failed.
    seams:       the share of answers with each seam, by the names of `lang.seams.Seams`.
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
    pairs = [(record, baseline.records[key]) for key, record in run.records.items()]
    records = list(run.records.values())
    answers = [record for record in records if record.error is None]

    def total(count: str) -> int:
        return sum(getattr(one, count) for one in answers)

    return Figures(
        prompts=len(records),
        failures=len(records) - len(answers),
        no_baseline=sum(base.error is not None for _, base in pairs),
        speedups=speedups(run, baseline, pairs),
        with_promise=mean([one.chunks > 0 for one in records]),
        hit_limit=mean([one.hit_limit for one in records]),
        plain_tokens=mean([one.plain_tokens for one in records]),
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
        verdicts = [getattr(of_answer, seam.name) for of_answer in seams]
        shares[seam.name] = mean([math.nan if verdict is None else verdict for verdict in verdicts])
    return shares


def speedups(run: RunFolder, baseline: RunFolder, pairs: Pairs) -> dict[str, Interval]:
    """Return each speedup. Raises PastaError if both runs were timed, but not in the same turns."""
    of_failure = run.settings["max_tokens"]
    found = {
        TOKENS_PER_STEP: geometric([one.tokens_per_step for one, _ in pairs]),
        SPEEDUP_IN_STEPS: geometric([_in_steps(*pair, of_failure) for pair in pairs]),
    }
    if all(record.turns is not None for both in pairs for record in both):
        if any(record.turns != base.turns for record, base in pairs):
            raise PastaError(
                f"{run.folder} and {baseline.folder} were not timed together",
                hint="Give both methods to one `pasta eval generate --timing`, to time again.",
            )
        found[WALL_CLOCK] = geometric([_wall_clock(*pair) for pair in pairs])
    return found


def _in_steps(record: Record, base: Record, of_failure: int) -> float:
    steps = record.critical_path if record.error is None else of_failure
    return math.nan if base.error is not None else max(1, base.plain_tokens) / max(1, steps)


def _wall_clock(record: Record, base: Record) -> float:
    for one in (record, base):
        if not one.seconds > 0:
            raise PastaError(f"the record {one.id} has no seconds: {one.seconds}")
    return math.nan if base.error is not None else base.seconds / record.seconds


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# What the package alpaca_eval put into a run folder, as runs/pasta/NAME/annotations.json and
# leaderboard.csv. A preference in [1, 2] is one for the reference's answer (1) or the model's (2).


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What alpaca_eval's annotator said of a run's answers against a reference's.

    annotator:   "" without verdicts.
    preferences: from 0 to 1 for the run, by the prompt's id; NaN without a verdict.
    win_rates:   in percent. The length-controlled one and its standard error are alpaca_eval's, if
                 it computed them. The plain one is the mean preference of the prompts with a
                 verdict: a missing verdict is no tie.
    """

    annotator: str = ""
    preferences: Mapping[str, float] = field(default_factory=dict)
    win_rates: Mapping[str, Interval] = field(default_factory=dict)
    # Shares of the prompts that have a verdict, of a judge that read both orders; else None.
    ties: float | None = None
    agreement: float | None = None


def verdicts_of(run: RunFolder, baseline: RunFolder) -> Verdicts:
    """Read what alpaca_eval left in a run's folder. Raises PastaError if it is of other answers."""
    found = sorted(run.folder.glob("**/annotations.json"))
    if len(found) > 1:
        raise PastaError(f"{run.folder} holds annotations of several judges: keep one of {found}")
    if not found or run is baseline:
        return Verdicts()
    path, preferences = found[0], dict.fromkeys(run.records, math.nan)
    ids = {record.instruction: key for key, record in run.records.items()}
    annotators = set()
    kinds = KeyError, TypeError, ValueError, AttributeError
    with errors_as(f"{path}: not alpaca_eval's annotations", *kinds):
        for row in read_json(path, list):
            if (key := ids.get(row["instruction"])) is None:
                continue
            answers = [one.records[key].text.strip() for one in (baseline, run)]
            if [row["output_1"].strip(), row["output_2"].strip()] != answers:
                raise PastaError(
                    f"{path} is of other answers to {row['instruction'][:60]!r} than "
                    f"{baseline.folder} and {run.folder} hold: run alpaca_eval again"
                )
            preference = math.nan if row["preference"] is None else float(row["preference"]) - 1
            if preference < 0 or preference > 1:
                raise PastaError(f"{path}: the preference {row['preference']} is not in [1, 2]")
            preferences[key] = preference
            annotators.add(str(row["annotator"]))
    rates = {WIN_RATE: mean([100 * one for one in preferences.values()])}
    rates |= _length_controlled(path.with_name("leaderboard.csv"), run.label)
    return Verdicts(", ".join(sorted(annotators)), preferences, rates)


def _length_controlled(path: Path, label: str) -> dict[str, Interval]:
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    with errors_as(f"{path}: not alpaca_eval's leaderboard", csv.Error, KeyError, ValueError):
        for row in csv.DictReader(text.splitlines()):
            if next(iter(row.values())) == label and row.get("length_controlled_winrate"):
                value = float(row["length_controlled_winrate"])
                reach = 1.96 * float(row["lc_standard_error"])
                ends = (value - reach, value + reach) if 0 < reach < math.inf else ()
                return {LC_WIN_RATE: Interval(value, *ends)}
    return {}
