"""Intervals of figures, and the resamples they come from."""

from __future__ import annotations

import numpy as np
import pytest

from pasta_decoding.evaluation.bootstrap import RESAMPLES, FloatArray, drawn, interval, resamples


def mean(sums: FloatArray) -> FloatArray:
    return sums[..., 0] / sums[..., 1]


@pytest.mark.parametrize(
    ("prompts", "drawn_times"),
    [(1, RESAMPLES), (2_000, RESAMPLES), (4_000, 5_000), (25_000, 1_000)],
)
def test_many_prompts_are_resampled_less_often_and_each_resample_is_as_large_as_they(
    prompts: int, drawn_times: int
) -> None:
    counts_RP = resamples(prompts)
    assert counts_RP.shape == (drawn_times, prompts)
    assert (counts_RP.sum(axis=1) == prompts).all()


def test_an_interval_is_that_of_the_normal_distribution_where_there_are_many_prompts() -> None:
    values_P = np.random.default_rng(0).normal(3.0, 2.0, 400)
    found = interval(np.column_stack([values_P, np.ones(400)]), mean)
    error = 1.96 * values_P.std() / 20
    assert found.low == pytest.approx(values_P.mean() - error, abs=0.03)
    assert found.high == pytest.approx(values_P.mean() + error, abs=0.03)


def test_a_difference_of_two_figures_of_the_same_prompts_is_paired() -> None:
    values_P = np.random.default_rng(0).normal(0.0, 5.0, 50)
    first, second = (
        drawn(np.column_stack([values_P + shift, np.ones(50)]), mean) for shift in (0.0, 1.0)
    )
    found = second.minus(first).interval()
    assert found.low == pytest.approx(1.0)
    assert found.high == pytest.approx(1.0)
