"""Bootstrap intervals: how far a figure would move if other prompts of the kind had been asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
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


def interval(
    values_PF: npt.ArrayLike, figure: Callable[[FloatArray], FloatArray], *, seed: int = 0
) -> Interval:
    """Return a figure of P prompts with its percentile bootstrap interval.

    values_PF: F numbers a prompt.
    figure:    from sums over prompts [..., F] to the figure [...]; so it must be a function of
               sums, as means, their ratios and geometric means of ratios are.
    """
    found_PF = np.asarray(values_PF, dtype=np.float64)
    prompts = len(found_PF)
    draw = np.random.default_rng(seed)
    # How often a resample holds each prompt is all that its sums depend on.
    counts_RP = draw.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may hold nothing to divide by
        value, resampled_R = figure(found_PF.sum(axis=0)), figure(counts_RP @ found_PF)
    known = resampled_R[np.isfinite(resampled_R)]
    if not np.isfinite(value) or not len(known):
        return Interval(None, None, None)
    low, high = np.percentile(known, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))
