"""What every judge is used for: the quality of one answer among several, calibrated or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pasta_decoding.eval.judge.base import Calibrated, Judge, fingerprint, fold, quality


class Scripted:
    """Prefers by a table; what is not in it has no verdict."""

    def __init__(self, table: dict[tuple[str, str], float]) -> None:
        self.table = table

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        assert len(prompts) == len(a) == len(b)
        return [self.table.get(pair) for pair in zip(a, b, strict=True)]


JUDGE: Judge = Scripted({("x", "y"): 0.9, ("x", "z"): 0.7, ("y", "z"): 0.4})


def test_quality_is_the_mean_probability_of_beating_each_of_the_others() -> None:
    assert quality(JUDGE, "p", ["x", "y", "z"]) == pytest.approx([0.8, 0.25, 0.45])


def test_a_missing_verdict_is_no_tie_and_leaves_the_others_alone() -> None:
    judge = Scripted({("x", "y"): 0.9})
    assert quality(judge, "p", ["x", "y", "z"]) == [0.9, pytest.approx(0.1), None]


def test_a_lone_answer_is_as_good_as_the_group_and_no_answers_have_no_quality() -> None:
    assert quality(JUDGE, "p", ["x"]) == [0.5]
    assert quality(JUDGE, "p", []) == []


def test_calibration_bends_probabilities_and_keeps_ties_orders_and_missing_ones() -> None:
    judge = Calibrated(JUDGE, slope=0.5)
    [forward] = judge.prefer(["p"], ["x"], ["y"])
    assert forward == pytest.approx(0.75)  # odds of 9 to 1 become 3 to 1
    assert Calibrated(Scripted({("y", "x"): 0.1}), 0.5).prefer(["p"], ["y"], ["x"]) == [
        pytest.approx(0.25)
    ]
    assert Calibrated(Scripted({("x", "y"): 0.5}), 3.0).prefer(["p"], ["x"], ["y"]) == [0.5]
    assert judge.prefer(["p"], ["x"], ["other"]) == [None]


def test_certainty_is_calibrated_to_something_finite() -> None:
    [sure] = Calibrated(Scripted({("x", "y"): 1.0}), 2.0).prefer(["p"], ["x"], ["y"])
    assert sure is not None
    assert 0.99 < sure < 1


def test_case_and_spacing_do_not_make_another_prompt() -> None:
    assert (
        fingerprint(" What  is\nit? ") == fingerprint("what is it?") != fingerprint("what was it?")
    )


def test_prompts_fall_into_four_folds_of_about_the_same_size() -> None:
    sizes = [0, 0, 0, 0]
    for number in range(400):
        sizes[fold(f"prompt {number}")] += 1
    assert min(sizes) > 70
