"""The local judge: what it can learn, what it must not see, and the file it is kept in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.errors import PastaError
from pasta_decoding.eval.judge.base import FOLDS, Pair, fold
from pasta_decoding.eval.judge.features import FEATURES
from pasta_decoding.eval.judge.fit import (
    Measured,
    cross_calibrated,
    cross_fitted,
    fit,
    logistic,
    measure,
)
from pasta_decoding.eval.judge.local import LocalJudge, load_judge, save_judge
from tests.judging import made_up, repeating, varied


def fitted(pairs: list[Pair]) -> LocalJudge:
    found = measure(pairs)
    return fit(found, found.fold_P != 0)


@pytest.fixture(scope="module")
def honest() -> LocalJudge:
    """Learned that repetition loses, where length says nothing."""
    return fitted(made_up(80))


@pytest.fixture(scope="module")
def tempted() -> LocalJudge:
    """Learned where the better answer is the longer one, too."""
    return fitted(made_up(80, longer_wins=True))


def one(judge: LocalJudge, a: str, b: str) -> float:
    [preference] = judge.prefer(["What about it?"], [a], [b])
    assert preference is not None
    return preference


def test_it_learns_from_examples_what_loses(honest: LocalJudge) -> None:
    draw = Random(1)
    for _ in range(20):
        assert one(honest, varied(draw, 40), repeating(draw, 40)) > 0.7
        assert one(honest.equal_length(), varied(draw, 40), repeating(draw, 40)) > 0.7


def test_its_probability_is_as_often_right_as_it_says(honest: LocalJudge) -> None:
    fresh = [pair for pair in made_up(200) if fold(pair.prompt) == 0]
    texts = ([getattr(pair, name) for pair in fresh] for name in ("prompt", "a", "b"))
    said = [max(p, 1 - p) for p in honest.prefer(*texts) if p is not None]
    assert sum(said) / len(said) == pytest.approx(0.9, abs=0.06)


@given(st.text(max_size=80), st.text(max_size=80), st.booleans())
def test_the_order_never_matters(honest: LocalJudge, a: str, b: str, equal: bool) -> None:
    judge = honest.equal_length() if equal else honest
    assert one(judge, a, b) + one(judge, b, a) == pytest.approx(1.0)
    assert one(judge, a, a) == 0.5


def test_at_equal_length_a_longer_answer_of_the_same_kind_is_not_better(
    tempted: LocalJudge,
) -> None:
    draw = Random(2)
    games = [(varied(draw, 60), varied(draw, 25)) for _ in range(30)]
    whole = [one(tempted, a, b) for a, b in games]
    equal = [one(tempted.equal_length(), a, b) for a, b in games]
    assert np.mean(whole) > 0.9
    assert abs(np.mean(equal) - 0.5) < 0.1


def test_the_same_pairs_give_the_same_judge() -> None:
    assert fitted(made_up(30)) == fitted(made_up(30))


def test_it_is_never_fitted_on_a_held_out_prompt(honest: LocalJudge) -> None:
    pairs = made_up(80)
    seen = [honest.has_seen(pair.prompt) for pair in pairs]
    assert seen == [fold(pair.prompt) != 0 for pair in pairs]
    assert honest.trained_on == {"made_up": sum(seen)}
    assert honest.has_seen(next(p.prompt for p in pairs if fold(p.prompt)).upper())


def test_every_pair_is_judged_by_the_judge_that_has_not_seen_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measure(made_up(40))
    judges: list[LocalJudge] = []

    def watched(measured: Measured, chosen_P: Any) -> LocalJudge:
        judges.append(fit(measured, chosen_P))
        return judges[-1]

    monkeypatch.setattr("pasta_decoding.eval.judge.fit.fit", watched)
    whole, equal = cross_fitted(found, np.ones(len(found.pairs), dtype=bool))
    assert len(judges) == FOLDS
    for place, pair in enumerate(found.pairs):
        [blind] = [judge for judge in judges if not judge.has_seen(pair.prompt)]
        for preferences, judge in ((whole, blind), (equal, blind.equal_length())):
            [expected] = judge.prefer([pair.prompt], [pair.a], [pair.b])
            assert preferences[place] == pytest.approx(expected)


def test_a_source_that_is_only_examined_changes_nothing() -> None:
    pairs, others = made_up(40), made_up(60, source="others", longer_wins=True)
    mine_P = np.array([True] * len(pairs) + [False] * len(others))
    alone, _equal = cross_fitted(measure(pairs), np.ones(len(pairs), dtype=bool))
    beside, _equal = cross_fitted(measure([*pairs, *others]), mine_P)
    assert beside[: len(pairs)] == pytest.approx(alone)
    assert None not in beside


def test_a_prompt_spelt_in_two_ways_is_left_out_where_one_of_them_was_trained_on() -> None:
    pairs = made_up(40)
    twin = next(
        replace(pair, prompt=spelt)
        for pair in pairs
        if fold(spelt := pair.prompt.upper()) != fold(pair.prompt)
    )
    whole, _equal = cross_fitted(measure([*pairs, twin]), np.ones(len(pairs) + 1, dtype=bool))
    missing = {pair.prompt for pair, p in zip([*pairs, twin], whole, strict=True) if p is None}
    assert {prompt.upper() for prompt in missing} == {twin.prompt}
    assert len(missing) == 2


def test_few_prompts_make_no_judge() -> None:
    with pytest.raises(PastaError, match="only 2 prompts to train a judge on"):
        fit(found := measure(made_up(2)), np.ones(len(found.pairs), dtype=bool))


def test_pairs_of_one_prompt_together_count_as_ten_at_most() -> None:
    [first, second, *_] = made_up(1)
    assert list(measure([first] * 40 + [replace(second, source="other")]).weight_P) == [
        0.25
    ] * 40 + [1.0]


def test_the_regression_is_where_the_gradient_of_the_penalised_loss_is_zero() -> None:
    # One column of ones, three wins in four, no penalty: the logit of 0.75.
    columns, wins = np.ones((4, 1)), np.array([1.0, 1.0, 1.0, 0.0])
    assert logistic(columns, wins, np.ones(4), np.zeros(1)) == pytest.approx(np.log(3))
    [held_back] = logistic(columns, wins, np.ones(4), np.ones(1))
    assert 4 * (1 / (1 + np.exp(-held_back)) - 0.75) + held_back == pytest.approx(0, abs=1e-6)


def test_somebody_elses_verdicts_are_calibrated_on_other_prompts() -> None:
    # A source that takes the judge's side three times in four, a judge that is sure of itself.
    pairs = [Pair("s", f"p{n}", "a", "b", float(n % 4 != 0)) for n in range(400)]
    said, slope = cross_calibrated(pairs, [0.98] * 399 + [None])
    assert said[-1] is None
    assert said[:-1] == pytest.approx([0.75] * 399, abs=0.04)
    assert slope == pytest.approx(np.log(3) / np.log(49), abs=0.02)


def test_verdicts_against_all_evidence_are_worth_nothing_rather_than_their_opposite() -> None:
    pairs = [Pair("s", f"p{n}", "a", "b", 0.0) for n in range(50)]
    said, slope = cross_calibrated(pairs, [0.9] * 50)
    assert (set(said), slope) == ({0.5}, 0.0)


def test_a_saved_judge_is_the_same_judge(honest: LocalJudge, tmp_path: Path) -> None:
    path = tmp_path / "judge.json"
    save_judge(path, honest)
    assert load_judge(path) == honest
    assert [entry.name for entry in tmp_path.iterdir()] == ["judge.json"]
    told = json.loads(path.read_text())
    assert told["features"] == list(FEATURES)
    assert told["trained_on"] == honest.trained_on


BREAKS: list[tuple[dict[str, Any], str]] = [
    ({"format": "pasta-judge-0"}, "not a judge of the format pasta-judge-1"),
    ({"features": ["length"]}, "it looks at other features than this version"),
    ({"length_knots": []}, "it looks at other features than this version"),
    ({"charm": 1}, "missing or unknown: charm"),
    ({"slope": "steep"}, "'slope' is not 1 finite numbers"),
    ({"slope": float("nan")}, "'slope' is not 1 finite numbers"),
    ({"weights_F": [1.0]}, f"'weights_F' is not {len(FEATURES)} finite numbers"),
    ({"length_K": None}, "'length_K' is not 6 finite numbers"),
    ({"trained_on": []}, "what it was trained on is missing"),
    ({"trained_on": {"s": "many"}}, "what it was trained on is missing"),
    ({"prompts": 3}, "what it was trained on is missing"),
]


@pytest.mark.parametrize(("change", "message"), BREAKS)
def test_a_file_that_is_no_judge_is_refused(
    change: dict[str, Any], message: str, honest: LocalJudge, tmp_path: Path
) -> None:
    path = tmp_path / "judge.json"
    save_judge(path, honest)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PastaError) as found:
        load_judge(path)
    assert str(found.value) == f"{path}: {message}"
    assert found.value.hint == "Make a judge with `pasta judge train`."


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"\xff"])
def test_a_file_of_something_else_is_refused(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "judge.json"
    path.write_bytes(contents)
    with pytest.raises(PastaError, match=r"judge\.json: not "):
        load_judge(path)


def test_a_judge_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match=r"cannot read .*judge\.json: No such file"):
        load_judge(tmp_path / "judge.json")
