"""A run folder: what is resumed, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.training.run import begin_run, find_run, last_checkpoint


@dataclass(frozen=True)
class Config:
    data: tuple[str, ...] = ("a.jsonl", "b.jsonl")
    learning_rate: float = 1e-3
    max_steps: int | None = None


def refusal(out: Path, config: Config) -> PastaError:
    with pytest.raises(PastaError) as caught:
        find_run(out, config)
    return caught.value


def test_the_same_settings_go_on_and_a_new_folder_begins(tmp_path: Path) -> None:
    assert find_run(tmp_path / "run", Config()) is None
    begin_run(tmp_path / "run", Config())
    assert find_run(tmp_path / "run", Config()) is None


def test_every_setting_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    begin_run(tmp_path, Config())
    error = refusal(tmp_path, replace(Config(), data=("a.jsonl",), max_steps=5))
    assert str(error) == (
        f"{tmp_path} was begun with other settings: "
        "data (['a.jsonl', 'b.jsonl'] -> ['a.jsonl']), max_steps (None -> 5)"
    )


def test_a_setting_that_the_run_did_not_know_had_its_default(tmp_path: Path) -> None:
    begin_run(tmp_path, Config())
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["learning_rate"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"old": 1}))
    assert str(refusal(tmp_path, Config())).endswith("settings: old (1 -> None)")
    assert str(refusal(tmp_path, Config(learning_rate=0.5))).endswith(
        ": learning_rate (0.001 -> 0.5), old (1 -> None)"
    )


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_settings_that_cannot_be_read_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    error = refusal(tmp_path, Config())
    assert str(error).startswith(
        f"the settings of the run in {tmp_path / 'config.json'} cannot be read: "
    )


def test_the_last_checkpoint_is_the_one_with_the_most_steps_that_is_whole(tmp_path: Path) -> None:
    for step, state in ((9, "{}"), (10, "{}"), (11, '{"global_step"'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
