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

from pasta_decoding.eval.judge.base import Pair

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Answers are of similar length if neither has more than so many times the other's characters.
SIMILAR_LENGTH = 1.25
MAX_MISSING = 0.05
_BINS = 10
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figures:
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
    similar:  on pairs of similar length, of the judge at equal length.
    missing:  share of pairs without a verdict.
    log_loss, brier, calibration_error: on all pairs, ties included.
    """

    source: str
    asked: int
    missing: float
    every: Figures | None
    similar: Figures | None
    log_loss: float | None = None
    brier: float | None = None
    calibration_error: float | None = None
    similar_calibration_error: float | None = None

    @property
    def usable_for_training(self) -> bool:
        """Does it beat length beyond its interval on all pairs and on those of similar length?"""
        return self.missing <= MAX_MISSING and all(
            one is not None and one.gain.low > 0 for one in (self.every, self.similar)
        )


Verdicts = Sequence[float | None]


def evaluate(
    pairs: Sequence[Pair], whole: Verdicts, equal: Verdicts, *, seed: int = 0
) -> list[SourceReport]:
    """Report on each source, and on all parts of a source (`NAME/part`) together as `NAME`.

    whole: the judge's preferences. equal: those at equal length; the same ones for a judge that
    has no such mode.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, pair in enumerate(pairs):
        for source in dict.fromkeys((pair.source.partition("/")[0], pair.source)):
            places[source].append(place)
    return [
        _report(
            source,
            [pairs[place] for place in chosen],
            _numbers([whole[place] for place in chosen]),
            _numbers([equal[place] for place in chosen]),
            seed,
        )
        for source, chosen in sorted(places.items())
    ]


def _numbers(verdicts: Verdicts) -> Array:
    """Return the verdicts as an array in which NaN is a missing one."""
    return np.array([np.nan if one is None else one for one in verdicts], dtype=np.float64)


def _report(
    source: str, pairs: Sequence[Pair], whole_P: Array, equal_P: Array, seed: int
) -> SourceReport:
    preference_P = np.array([pair.preference for pair in pairs])
    judged_P = ~np.isnan(whole_P)
    similar_P = judged_P & (np.abs(_longer(pairs)["characters"]) <= np.log(SIMILAR_LENGTH))
    found = SourceReport(
        source,
        asked=len(pairs),
        missing=1 - float(judged_P.mean()),
        every=_figures(pairs, whole_P, judged_P, seed),
        similar=_figures(pairs, equal_P, similar_P, seed),
    )
    if not judged_P.any():
        return found
    right_P, kept_P = preference_P[judged_P], np.clip(whole_P[judged_P], 1e-6, 1 - 1e-6)
    return replace(
        found,
        log_loss=float(-np.mean(right_P * np.log(kept_P) + (1 - right_P) * np.log1p(-kept_P))),
        brier=float(np.mean((whole_P[judged_P] - right_P) ** 2)),
        calibration_error=calibration_error(whole_P[judged_P], right_P),
        similar_calibration_error=calibration_error(equal_P[similar_P], preference_P[similar_P]),
    )


def _figures(pairs: Sequence[Pair], verdict_P: Array, chosen_P: Mask, seed: int) -> Figures | None:
    preference_P = np.array([pair.preference for pair in pairs])
    chosen_P = chosen_P & (preference_P != 0.5)
    if not chosen_P.any():
        return None
    sides_P = preference_P[chosen_P] > 0.5
    rules = {
        f"{which} {unit}": _agrees(sign * longer_P[chosen_P], sides_P)
        for unit, longer_P in _longer(pairs).items()
        for which, sign in (("more", 1), ("fewer", -1))
    }
    rule, floor_P = max(rules.items(), key=lambda one: one[1].mean())
    right_P = _agrees(verdict_P[chosen_P] - 0.5, sides_P)
    chosen = [pair.prompt for pair, is_in in zip(pairs, chosen_P, strict=True) if is_in]
    _, prompt_P = np.unique(chosen, return_inverse=True)
    return Figures(
        pairs=len(chosen),
        prompts=int(prompt_P.max()) + 1,
        length_rule=rule,
        floor=float(floor_P.mean()),
        accuracy=bootstrap(right_P, prompt_P, seed),
        gain=bootstrap(right_P - floor_P, prompt_P, seed),
    )


def _longer(pairs: Sequence[Pair]) -> dict[str, Array]:
    """Return by how much a is longer than b, as a difference of logs, in two units."""
    characters = [(len(pair.a.strip()), len(pair.b.strip())) for pair in pairs]
    words = [(len(pair.a.split()), len(pair.b.split())) for pair in pairs]
    sizes = {"characters": characters, "words": words}
    return {unit: -np.diff(np.log1p(np.array(size)))[:, 0] for unit, size in sizes.items()}


def _agrees(margin_P: Array, sides_P: Mask) -> Array:
    """Return 1 where the margin's sign says a exactly where a is better, 0.5 where it is zero."""
    return np.where(margin_P == 0, 0.5, (margin_P > 0) == sides_P)


def bootstrap(value_P: Array, prompt_P: NDArray[np.intp], seed: int) -> Interval:
    """Return the mean of values and its interval; prompts are drawn again, not pairs."""
    sums, counts = np.bincount(prompt_P, value_P), np.bincount(prompt_P)
    draws = np.random.default_rng(seed)
    means = []
    for _ in range(_RESAMPLES):
        drawn = draws.integers(0, len(sums), len(sums))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(value_P.mean()), float(low), float(high))


def calibration_error(verdict_P: Array, preference_P: Array) -> float | None:
    """Return the calibration error (see above); None of nothing."""
    if not len(verdict_P):
        return None
    sure_P = np.maximum(verdict_P, 1 - verdict_P)
    right_P = np.where(verdict_P >= 0.5, preference_P, 1 - preference_P)
    bins_P = np.minimum((2 * _BINS * (sure_P - 0.5)).astype(np.int64), _BINS - 1)
    gaps = np.bincount(bins_P, right_P - sure_P)
    return float(np.abs(gaps).sum() / len(verdict_P))
