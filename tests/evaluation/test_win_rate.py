"""Win rates: worked by hand, and as the package alpaca_eval computes them on the same verdicts.

`PASTA_ALPACA_EVAL` names a folder with AlpacaEval's annotations, outputs and references, for the
comparison on real verdicts.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pasta_decoding.evaluation import win_rate as win_rates
from pasta_decoding.evaluation.win_rate import Verdicts, length_controlled, win_rate


def verdicts(preferences: list[float], longer: list[float] | None = None) -> Verdicts:
    return Verdicts(np.array(preferences), np.array(longer or [0.0] * len(preferences)))


def test_a_win_rate_is_the_mean_preference() -> None:
    assert win_rate(verdicts([1.0, 0.5, 0.0, 0.75])).value == pytest.approx(56.25)


def test_a_missing_verdict_is_no_tie() -> None:
    found = verdicts([1.0, float("nan"), 0.8, float("nan")])
    assert win_rate(found).value == pytest.approx(90)
    assert (found.judged, found.missing) == (2, 2)


def test_the_interval_of_a_win_rate_is_two_standard_errors_wide() -> None:
    preferences = np.random.default_rng(3).uniform(size=400)
    found = win_rate(verdicts(list(preferences))).interval()
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(400 * preferences.std() / 20, rel=0.1)


def test_nothing_judged_is_no_win_rate() -> None:
    nothing = verdicts([float("nan")] * 6)
    assert win_rate(nothing).interval().value is None
    assert length_controlled(nothing).interval().value is None


def test_where_lengths_are_equal_control_changes_nothing() -> None:
    # One weight w is left: the model's own. It minimises |w| + C x the entropy; with C = 10,000, as
    # all folds ask for, sigmoid(w) is the mean but for one part in thousands.
    preferences = [0.9, 0.7] * 40
    assert length_controlled(verdicts(preferences)).value == pytest.approx(80, abs=0.02)


def test_a_model_that_wins_by_length_alone_is_controlled_to_one_half() -> None:
    # Twice as long half of the time and preferred just then, by hand: tanh(+-1) w_length explains
    # all, and at length zero nothing is left to prefer.
    longer = [-100.0, 100.0] * 40
    preferences = [0.9, 0.1] * 40
    found = length_controlled(verdicts(preferences, longer))
    assert found.value == pytest.approx(50, abs=0.01)
    assert win_rate(verdicts(preferences, longer)).value == pytest.approx(50)
    # Longer on two thirds of the prompts, it wins more often than it is better.
    often = [-100.0, -100.0, 100.0] * 30
    biased = verdicts([0.9 if longer < 0 else 0.1 for longer in often], often)
    assert win_rate(biased).value == pytest.approx(100 * (0.9 * 2 + 0.1) / 3)
    assert length_controlled(biased).value == pytest.approx(50, abs=5)


def test_the_fit_is_the_minimum_of_its_loss() -> None:
    draw = np.random.default_rng(5)
    terms_PF = np.stack([draw.normal(size=60), draw.normal(size=60), np.ones(60)], axis=1)
    preference_P = draw.uniform(size=60)
    weights_F = win_rates._fit(terms_PF, preference_P, 0.36)

    def loss(at_F: Any) -> float:
        logit_P = terms_PF @ at_F
        entropy_P = np.logaddexp(0, logit_P) - preference_P * logit_P
        return float(np.abs(at_F).sum() + 0.36 * entropy_P.sum())

    for step_F in np.concatenate([np.eye(3), -np.eye(3)]) * 1e-3:
        assert loss(weights_F) <= loss(weights_F + step_F)


def test_a_resample_is_fitted_as_if_its_prompts_had_been_asked_so_often() -> None:
    draw = np.random.default_rng(6)
    terms_PF = np.stack([draw.normal(size=80), np.ones(80)], axis=1)
    preference_P = draw.uniform(size=80)
    count_P = draw.multinomial(80, np.full(80, 1 / 80)).astype(float)
    [once_F] = win_rates._fit_each(terms_PF, preference_P, count_P[None])
    often = np.repeat(np.arange(80), count_P.astype(int))
    again_F = win_rates._fit(terms_PF[often], preference_P[often], 1e4)
    assert once_F == pytest.approx(again_F, abs=2e-3)


def test_an_interval_has_a_width_where_the_penalty_leaves_no_weight() -> None:
    # So few verdicts, and even ones: on rows left out nothing explains them better than a coin.
    draw = np.random.default_rng(8)
    above = draw.uniform(0, 0.5, size=20)
    preferences = [half for one in above for half in (0.5 + one, 0.5 - one)]
    found = length_controlled(verdicts(preferences, list(draw.normal(size=40))))
    one = found.interval()
    assert one.value == pytest.approx(50, abs=0.01)
    assert one.low is not None
    assert one.high is not None
    assert one.high - one.low > 5


# Against the package

Rows = list[dict[str, Any]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package's function; its call of the hub gives the rows of `difficulties`."""
    glm = importlib.import_module("alpaca_eval.metrics.glm_winrate")

    def compute(rows: Rows, difficulties: list[float], name: str) -> dict[str, float]:
        import pandas as pd

        local = tmp_path / "df_gamed.csv"
        table = {"index": range(len(difficulties)), "instruction_difficulty": difficulties}
        pd.DataFrame(table | {"model": "any"}).to_csv(local, index=False)
        monkeypatch.setattr(glm, "hf_hub_download", lambda **_settings: str(local))
        found: dict[str, float] = glm.get_length_controlled_winrate(
            pd.DataFrame(rows), glm_name=name, save_weights_dir=None, is_warn_extreme_changes=False
        )
        return found

    return compute


def as_rows(found: Verdicts, model: str = "model") -> Rows:
    """Return what alpaca_eval would have written: only the texts' lengths matter."""
    return [
        {
            "index": number,
            "instruction": str(number),
            "output_1": "x" * int(max(longer, 0)),
            "output_2": "x" * int(max(-longer, 0)),
            "generator_1": "reference",
            "generator_2": model,
            "annotator": "any",
            "preference": 1 + preference if np.isfinite(preference) else None,
        }
        for number, (preference, longer) in enumerate(
            zip(found.preference_P, found.longer_P, strict=True)
        )
    ]


def made_up(seed: int, *, missing: float = 0.0) -> Verdicts:
    """Preferences that depend on length, difficulty and model, with much chance in them."""
    draw = np.random.default_rng(seed)
    longer_P, difficulty_P = draw.normal(100, 600, 300).round(), draw.normal(-1, 1, 300)
    logit_P = draw.normal(0.4 * difficulty_P - np.tanh(longer_P / 600) + draw.normal(), 1.5)
    preference_P = 1 / (1 + np.exp(-logit_P))
    preference_P[draw.uniform(size=300) < missing] = np.nan
    return Verdicts(preference_P, longer_P, difficulty_P)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["length_controlled_noreg", "length_controlled_minimal"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_win_rates_are_those_of_the_package(
    package: Any, monkeypatch: pytest.MonkeyPatch, seed: int, name: str
) -> None:
    monkeypatch.setattr(win_rates, "_LC_RESAMPLES", 1)
    found = made_up(seed, missing=0.05 * seed)
    assert found.difficulty_P is not None
    theirs = package(as_rows(found), list(found.difficulty_P), name)
    if name.endswith("minimal"):
        found = Verdicts(found.preference_P, found.longer_P)
    assert win_rate(found).value == pytest.approx(theirs["win_rate"], abs=1e-9)
    ours = length_controlled(found).value
    assert ours == pytest.approx(theirs["length_controlled_winrate"], abs=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.skipif("PASTA_ALPACA_EVAL" not in os.environ, reason="PASTA_ALPACA_EVAL is not set")
def test_win_rates_of_many_models_on_real_verdicts_are_those_of_the_package(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(win_rates, "_LC_RESAMPLES", 1)
    difficulties, models = read_real(Path(os.environ["PASTA_ALPACA_EVAL"]))
    assert len(models) > 20
    for model, found in models.items():
        theirs = package(as_rows(found, model), difficulties, "length_controlled_noreg")
        ours = length_controlled(found).value
        assert win_rate(found).value == pytest.approx(theirs["win_rate"], abs=1e-9), model
        assert ours == pytest.approx(theirs["length_controlled_winrate"], abs=0.1), model


def read_real(folder: Path) -> tuple[list[float], dict[str, Verdicts]]:
    """Return difficulties by a row's number, and verdicts of each model on all of these rows."""
    with (folder / "instruction_difficulty_dev.csv").open() as file:
        rows = {int(r["instruction_id"]): float(r["instruction_difficulty"])
                for r in csv.DictReader(file)}  # fmt: skip
    ids = sorted(rows)
    outputs: dict[str, dict[int, str]] = defaultdict(dict)
    for path in sorted(folder.glob("outputs*.jsonl.gz")):
        for found in objects(path):
            outputs[found["model"]][found["instruction_id"]] = found["output"]
    references = {
        found["instruction_id"]: found["output"]
        for found in objects(folder / "references_dev.jsonl.gz")
        if found["reference"] == "gpt4_1106_preview"
    }
    preferences: dict[str, dict[int, float]] = defaultdict(dict)
    with gzip.open(folder / "annotations_dev.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            preferences[row["model"]][int(row["instruction_id"])] = float(row["preference"]) - 1
    models = {}
    for model, said in preferences.items():
        if set(ids) <= outputs[model].keys() and set(ids) <= said.keys():
            longer = [len(references[one]) - len(outputs[model][one]) for one in ids]
            models[model] = Verdicts(
                np.array([said[one] for one in ids]),
                np.array(longer, dtype=np.float64),
                np.array([rows[one] for one in ids]),
            )
    return [rows[one] for one in ids], models


def objects(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
