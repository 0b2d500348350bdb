"""The figures of a judge, each from verdicts few enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pasta_decoding.evaluation.bootstrap import Interval
from pasta_decoding.evaluation.judge.base import JudgedPair
from pasta_decoding.evaluation.judge.evaluate import (
    SourceReport,
    calibration_error,
    evaluate,
    mean,
)

LONG, SHORT = "a long answer of many words " * 4, "brief"


def pair(a: str, b: str, preference: float, prompt: str = "p", source: str = "s") -> JudgedPair:
    return JudgedPair(source, prompt, a, b, preference)


def report(pairs: list[JudgedPair], verdicts: list[float | None]) -> SourceReport:
    [found] = evaluate(pairs, verdicts)
    return found


def test_accuracy_leaves_ties_of_the_source_out_and_halves_those_of_the_judge() -> None:
    pairs = [pair(LONG, SHORT, 1.0), pair(LONG, SHORT, 0.0), pair(LONG, SHORT, 0.5)]
    found = report(pairs, [0.9, 0.5, 0.1]).every
    assert found is not None
    assert (found.pairs, found.accuracy.value) == (2, 0.75)


def test_the_length_rule_is_the_best_of_four_in_hindsight_and_the_gain_is_beyond_it() -> None:
    shorter_wins = [pair(LONG, SHORT, 0.0)] * 3 + [pair(SHORT, LONG, 0.0)]
    found = report(shorter_wins, [0.1] * 4).every
    assert found is not None
    assert (found.length_rule, found.floor) == ("fewer characters", 0.75)
    assert (found.accuracy.value, found.gain.value) == (1.0, 0.25)


def test_similar_length_means_at_most_a_quarter_more_characters() -> None:
    pairs = [pair("x" * 125, "y" * 100, 1.0), pair("x" * 130, "y" * 100, 1.0)]
    [found] = evaluate(pairs, [0.2, 0.9])
    assert found.every is not None
    assert found.similar is not None
    assert (found.every.pairs, found.every.accuracy.value) == (2, 0.5)
    assert (found.similar.pairs, found.similar.accuracy.value) == (1, 0.0)


def test_a_missing_verdict_is_counted_as_missing_and_nowhere_else() -> None:
    pairs = [pair(LONG, SHORT, 1.0)] * 4
    found = report(pairs, [0.9, None, float("nan"), 0.9])
    assert found.every is not None
    assert (found.asked, found.missing) == (4, 0.5)
    assert (found.every.pairs, found.every.accuracy.value) == (2, 1.0)
    assert found.log_loss == pytest.approx(-np.log(0.9))
    assert found.brier == pytest.approx(0.01)


def test_a_source_without_any_verdict_has_no_figures() -> None:
    found = report([pair(LONG, SHORT, 1.0)], [None])
    assert (found.missing, found.every, found.similar, found.log_loss) == (1.0, None, None, None)
    assert not found.usable


def test_sources_are_kept_apart_and_parts_of_one_are_also_put_together() -> None:
    pairs = [
        pair(LONG, SHORT, 1.0, source="s/even"),
        pair(LONG, SHORT, 0.0, source="s/uneven"),
        pair(LONG, SHORT, 1.0, source="t"),
    ]
    found = evaluate(pairs, [0.9] * 3)
    accuracies = {one.source: one.every.accuracy.value for one in found if one.every}
    assert accuracies == {"s": 0.5, "s/even": 1.0, "s/uneven": 0.0, "t": 1.0}


def test_calibration_error_is_the_gap_between_how_sure_and_how_often_right() -> None:
    # Three quarters sure both ways: right one time in two. Certain: always right.
    verdicts, truth = np.array([0.75, 0.25, 1.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert calibration_error(verdicts, truth) == pytest.approx((2 * 0.25 + 2 * 0.0) / 4)
    assert calibration_error(np.array([]), np.array([])) is None


def test_intervals_come_from_prompts_and_not_from_pairs() -> None:
    # A hundred pairs, but two prompts: one always right, one never.
    values, prompts = np.repeat([1.0, 0.0], 50), np.repeat([0, 1], 50)
    assert mean(values, prompts, seed=0) == Interval(0.5, 0.0, 1.0)
    wide = mean(values, np.arange(100), seed=0)
    assert wide.low == pytest.approx(0.4, abs=0.02)
    assert wide.high == pytest.approx(0.6, abs=0.02)
    assert mean(values, np.arange(100), seed=0) == wide


def games(right: int, wrong: int) -> tuple[list[JudgedPair], list[float | None]]:
    """Pairs of similar length in which length says nothing, and verdicts on them."""
    pairs = [
        pair("x" * (100 + n % 2), "y" * (101 - n % 2), 1.0, prompt=f"p{n}")
        for n in range(right + wrong)
    ]
    verdicts: list[float | None] = [0.8 if n < right else 0.2 for n in range(right + wrong)]
    return pairs, verdicts


def test_a_judge_is_usable_where_it_beats_length_beyond_its_interval() -> None:
    pairs, verdicts = games(right=80, wrong=20)
    assert report(pairs, verdicts).usable


def test_a_judge_that_may_just_have_been_lucky_is_not_usable() -> None:
    pairs, verdicts = games(right=52, wrong=48)
    found = report(pairs, verdicts)
    assert found.every is not None
    assert found.every.gain.value == pytest.approx(0.02)
    assert not found.usable


def test_a_judge_that_often_has_no_verdict_is_not_usable() -> None:
    pairs, verdicts = games(right=100, wrong=0)
    assert report(pairs, verdicts[:96] + [None] * 4).usable
    assert not report(pairs, verdicts[:94] + [None] * 6).usable
