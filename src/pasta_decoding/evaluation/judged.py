"""A judge's preferences between a run and the baseline: of all answers, and of complete ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pasta_decoding.data.endpoint import Endpoint
from pasta_decoding.data.judge import AnswerPair, Preference, judge_pairs
from pasta_decoding.data.lines import locked
from pasta_decoding.evaluation.metrics import (
    SPEEDUP_IN_STEPS,
    WIN_RATE,
    Interval,
    Verdicts,
    mean,
    speedups,
)
from pasta_decoding.evaluation.records import Record, RunFolder

REPLIES = "verdicts.jsonl"
"""The file of a run folder that keeps the judge's replies."""
ENDED_SPEEDUP_IN_STEPS = "speedup_in_steps_both_ended"
ENDED_WIN_RATE = "win_rate_both_ended"
_TIE = (0.25, 0.75)  # a preference in this range is nearer to a half than to 0 or 1


@dataclass(frozen=True, slots=True)
class EndedFigures:
    """Figures of the prompts where the run and the baseline both ended their answers.

    prompts:   how many; an answer that failed or was cut by the token limit did not end.
    intervals: by `ENDED_SPEEDUP_IN_STEPS` and, of judged runs, `ENDED_WIN_RATE`.
    """

    prompts: int
    intervals: Mapping[str, Interval]


def judge_run(
    endpoint: Endpoint,
    progress: Callable[[int], object],
    run: RunFolder,
    baseline: RunFolder,
) -> Verdicts:
    """Return the judge's verdicts on a run. The run folder keeps the replies for the next time.

    progress: called with the number of further comparisons that are done; a prompt has two.

    Raises PastaError if the endpoint refuses or is down, or another process judges the run.
    """
    if run is baseline:
        return Verdicts()
    pairs = [
        AnswerPair(key, record.instruction, record.text, baseline.records[key].text)
        for key, record in run.records.items()
    ]
    with locked(run.folder):
        preferences = judge_pairs(endpoint, pairs, run.folder / REPLIES, progress=progress)
    return _summarised(endpoint.model, dict(zip(run.records, preferences, strict=True)))


def _summarised(judge: str, preferences: Mapping[str, Preference]) -> Verdicts:
    probabilities = {
        key: math.nan if preference.probability is None else preference.probability
        for key, preference in preferences.items()
    }
    orders = [preference.agreed for preference in preferences.values()]
    low, high = _TIE
    return Verdicts(
        annotator=judge,
        preferences=probabilities,
        win_rates={WIN_RATE: mean([100 * value for value in probabilities.values()])},
        ties=_share(
            [low <= value <= high for value in probabilities.values() if not math.isnan(value)]
        ),
        agreement=_share([agreed for agreed in orders if agreed is not None]),
    )


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def where_both_ended(run: RunFolder, baseline: RunFolder, verdicts: Verdicts) -> EndedFigures:
    """Return the figures of the prompts for which both answers ended."""
    pairs = {
        key: (record, baseline.records[key])
        for key, record in run.records.items()
        if _both_end(record, baseline.records[key])
    }
    in_steps = speedups(run, baseline, list(pairs.values()))[SPEEDUP_IN_STEPS]
    intervals = {ENDED_SPEEDUP_IN_STEPS: in_steps}
    if verdicts.preferences:
        intervals[ENDED_WIN_RATE] = mean([100 * verdicts.preferences[key] for key in pairs])
    return EndedFigures(len(pairs), intervals)


def _both_end(record: Record, base: Record) -> bool:
    return not any(answer.hit_limit or answer.error is not None for answer in (record, base))
