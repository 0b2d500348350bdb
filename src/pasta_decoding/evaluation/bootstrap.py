"""Bootstrap intervals: how far a figure would move if other prompts of the kind had been asked.

Figures of the same prompts, in the same order and with the same seed, are drawn with the same
resamples. So a difference of two of them is a paired one.

Shapes: P prompts, F numbers a prompt, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
_MAX_COUNTS = 20_000_000
_MIN_RESAMPLES = 1_000
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the interval that holds 95 % of its resamples; None where it has no value."""

    value: float | None
    low: float | None
    high: float | None

    def excludes(self, null: float) -> bool:
        """Does the interval lie on one side of `null`?"""
        return self.low is not None and self.high is not None and not self.low <= null <= self.high


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure of P prompts, and the same figure of each resample; NaN where it has no value."""

    value: float
    draws_R: FloatArray

    def interval(self) -> Interval:
        """Return the figure with its percentile bootstrap interval."""
        known = self.draws_R[np.isfinite(self.draws_R)]
        if not np.isfinite(self.value) or not len(known):
            return Interval(None, None, None)
        low, high = np.percentile(known, [2.5, 97.5])
        return Interval(float(self.value), float(low), float(high))

    def minus(self, other: Drawn) -> Drawn:
        """Return the difference of two figures of the same prompts."""
        return Drawn(self.value - other.value, self.draws_R - other.draws_R)

    def over(self, other: Drawn) -> Drawn:
        """Return the ratio of two figures of the same prompts."""
        return Drawn(self.value / other.value, self.draws_R / other.draws_R)


def drawn(
    values_PF: npt.ArrayLike, figure: Callable[[FloatArray], FloatArray], *, seed: int = 0
) -> Drawn:
    """Return a figure of P prompts with its resamples.

    values_PF: F numbers a prompt.
    figure:    from sums over prompts [..., F] to the figure [...]; so it must be a function of
               sums, as means, their ratios and geometric means of ratios are.
    """
    found_PF = np.asarray(values_PF, dtype=np.float64)
    counts_RP = resamples(len(found_PF), seed)
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may hold nothing to divide by
        return Drawn(float(figure(found_PF.sum(axis=0))), figure(counts_RP @ found_PF))


def interval(
    values_PF: npt.ArrayLike, figure: Callable[[FloatArray], FloatArray], *, seed: int = 0
) -> Interval:
    """Return a figure of P prompts with its percentile bootstrap interval; see `drawn`."""
    return drawn(values_PF, figure, seed=seed).interval()


@lru_cache(maxsize=1)  # 50 MB at 600 prompts, and a report asks for the same ones again and again
def resamples(prompts: int, seed: int = 0) -> FloatArray:
    """Return counts_RP: how often each resample holds each prompt. All that its sums depend on.

    R is `RESAMPLES`; fewer for more than 2,000 prompts, which would take over 160 MB.
    """
    resampled = max(_MIN_RESAMPLES, min(RESAMPLES, _MAX_COUNTS // prompts))
    draw = np.random.default_rng(seed)
    counts_RP = draw.multinomial(prompts, np.full(prompts, 1 / prompts), size=resampled)
    return counts_RP.astype(np.float64)
