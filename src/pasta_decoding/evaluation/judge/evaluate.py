"""How good a judge is, source by source, against rules that look at length alone.

- accuracy: share of pairs, ties of the source left out, where the judge takes the side of the
  source; an undecided 0.5 counts one half. Intervals are 95 % bootstraps over prompts.
- length rule: the longer or the shorter answer, in characters or words, whichever of the four
  does best on the very pairs in question; a judge must beat it without that hindsight.
- gain: accuracy of the judge less that of the length rule, on the same pairs.
- calibration error: mean distance of the side taken's probability from how often it was right, over
  ten bins of equal width, weighted by their pairs.

A missing verdict is counted as missing and enters nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pasta_decoding.evaluation.bootstrap import Interval, interval
from pasta_decoding.evaluation.judge.base import JudgedPair

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Answers are of similar length if neither has more than so many times the other's characters.
SIMILAR_LENGTH = 1.25
MAX_MISSING = 0.05
_BINS = 10


@dataclass(frozen=True, slots=True)
class JudgeFigures:
    """A judge on some pairs of one source.

    pairs, prompts: with a verdict and no tie.
    length_rule:    the one that does best, by name, with its `floor`.
    """

    pairs: int
    prompts: int
    length_rule: str
    floor: float
    accuracy: Interval
    gain: Interval


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What is known of a judge on one source; None where there are no pairs to tell from.

    every:    figures on all pairs.
    similar:  on pairs of similar length.
    missing:  share of pairs without a verdict.
    log_loss, brier, calibration_error: on all pairs, ties included.
    """

    source: str
    asked: int
    missing: float
    every: JudgeFigures | None
    similar: JudgeFigures | None
    log_loss: float | None = None
    brier: float | None = None
    calibration_error: float | None = None
    similar_calibration_error: float | None = None

    @property
    def usable(self) -> bool:
        """Does it beat length beyond its interval on all pairs and on those of similar length?"""
        return self.missing <= MAX_MISSING and all(
            one is not None and one.gain.low is not None and one.gain.low > 0
            for one in (self.every, self.similar)
        )


Verdicts = Sequence[float | None]


def evaluate(
    pairs: Sequence[JudgedPair], verdicts: Verdicts, *, seed: int = 0
) -> list[SourceReport]:
    """Report on each source, and on all parts of a source (`NAME/part`) together as `NAME`.

    verdicts: the judge's preferences, one a pair.
    """
    table = _table(pairs, verdicts)
    places: dict[str, list[int]] = defaultdict(list)
    for place, pair in enumerate(pairs):
        for source in dict.fromkeys((pair.source.partition("/")[0], pair.source)):
            places[source].append(place)
    return [_report(name, table.take(chosen), seed) for name, chosen in sorted(places.items())]


@dataclass(frozen=True, slots=True)
class _Table:
    """What is needed of each pair.

    verdict_P: NaN for a missing one.
    longer:    in two units, by how much a is longer than b: a difference of logs.
    """

    preference_P: Array
    verdict_P: Array
    prompt_P: NDArray[np.intp]
    longer: dict[str, Array]

    def take(self, places: Sequence[int] | Mask) -> _Table:
        """Return some of the rows."""
        return _Table(
            self.preference_P[places],
            self.verdict_P[places],
            self.prompt_P[places],
            {unit: longer_P[places] for unit, longer_P in self.longer.items()},
        )


def _table(pairs: Sequence[JudgedPair], verdicts: Verdicts) -> _Table:
    characters = [(len(pair.a.strip()), len(pair.b.strip())) for pair in pairs]
    words = [(len(pair.a.split()), len(pair.b.split())) for pair in pairs]
    sizes = {"characters": np.array(characters), "words": np.array(words)}
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    number = {prompt: at for at, prompt in enumerate(prompts)}
    return _Table(
        np.array([pair.preference for pair in pairs]),
        np.array([np.nan if one is None else one for one in verdicts]),
        np.array([number[pair.prompt] for pair in pairs]),
        {unit: np.log1p(size[:, 0]) - np.log1p(size[:, 1]) for unit, size in sizes.items()},
    )


def _report(source: str, asked: _Table, seed: int) -> SourceReport:
    judged = asked.take(~np.isnan(asked.verdict_P))
    similar = judged.take(np.abs(judged.longer["characters"]) <= np.log(SIMILAR_LENGTH))
    found = SourceReport(
        source,
        asked=len(asked.verdict_P),
        missing=1 - len(judged.verdict_P) / len(asked.verdict_P),
        every=_figures(judged, judged.verdict_P, seed),
        similar=_figures(similar, similar.verdict_P, seed),
    )
    if not len(judged.verdict_P):
        return found
    right_P, kept_P = judged.preference_P, np.clip(judged.verdict_P, 1e-6, 1 - 1e-6)
    return replace(
        found,
        log_loss=float(-np.mean(right_P * np.log(kept_P) + (1 - right_P) * np.log1p(-kept_P))),
        brier=float(np.mean((judged.verdict_P - right_P) ** 2)),
        calibration_error=calibration_error(judged.verdict_P, right_P),
        similar_calibration_error=calibration_error(similar.verdict_P, similar.preference_P),
    )


def _figures(found: _Table, verdict_P: Array, seed: int) -> JudgeFigures | None:
    decided_P = found.preference_P != 0.5
    if not decided_P.any():
        return None
    verdict_P, found = verdict_P[decided_P], found.take(decided_P)
    sides_P = found.preference_P > 0.5
    rules = {
        f"{which} {unit}": _agrees(sign * longer_P, sides_P)
        for unit, longer_P in found.longer.items()
        for which, sign in (("more", 1), ("fewer", -1))
    }
    rule, floor_P = max(rules.items(), key=lambda one: one[1].mean())
    right_P = _agrees(verdict_P - 0.5, sides_P)
    return JudgeFigures(
        pairs=len(right_P),
        prompts=len(np.unique(found.prompt_P)),
        length_rule=rule,
        floor=float(floor_P.mean()),
        accuracy=mean(right_P, found.prompt_P, seed),
        gain=mean(right_P - floor_P, found.prompt_P, seed),
    )


def _agrees(margin_P: Array, sides_P: Mask) -> Array:
    """Return 1 where the margin's sign says a exactly where a is better, 0.5 where it is zero."""
    return np.where(margin_P == 0, 0.5, (margin_P > 0) == sides_P)


def mean(value_P: Array, prompt_P: NDArray[np.intp], seed: int) -> Interval:
    """Return the mean of pairs with its interval; prompts are drawn again, not pairs."""
    _, prompt_P = np.unique(prompt_P, return_inverse=True)
    sums, counts = np.bincount(prompt_P, value_P), np.bincount(prompt_P)
    return interval(np.column_stack([sums, counts]), lambda of: of[..., 0] / of[..., 1], seed=seed)


def calibration_error(verdict_P: Array, preference_P: Array) -> float | None:
    """Return the calibration error (see above); None of nothing."""
    if not len(verdict_P):
        return None
    sure_P = np.maximum(verdict_P, 1 - verdict_P)
    right_P = np.where(verdict_P >= 0.5, preference_P, 1 - preference_P)
    bins_P = np.minimum((2 * _BINS * (sure_P - 0.5)).astype(np.int64), _BINS - 1)
    gaps = np.bincount(bins_P, right_P - sure_P)
    return float(np.abs(gaps).sum() / len(verdict_P))
