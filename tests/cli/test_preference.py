"""`pasta train preference` on a tiny model: what it prints, keeps and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta, interrupted

FLAGS = ["--samples", "6", "--max-tokens", "60", "--engine", "torch", "--dtype", "float32"]
TRAINING = ["--pairs-per-step", "1", "--no-bf16"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    asked = ["Why?", "How?", "What?", "Who?", "When?", "x" * 300]
    path.write_text("".join(json.dumps({"instruction": one}) + "\n" for one in asked))
    return path


@pytest.fixture
def train(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, prompts: Path, tmp_path: Path
) -> Callable[..., Outcome]:
    """Return a function that trains a round into `run`; named options take the place of its own."""

    def run(*flags: object, **options: object) -> Outcome:
        wanted: dict[str, object] = {
            "prompts": prompts,
            "out": tmp_path / "run",
            "policy": tiny_checkpoint.adapter,
            "baseline": tiny_checkpoint.adapter,
            "model": tiny_checkpoint.base,
            "max-prompt-chars": 50,
        }
        wanted |= {name.replace("_", "-"): value for name, value in options.items()}
        named = [part for name, value in wanted.items() for part in (f"--{name}", value)]
        return pasta("train", "preference", *named, *FLAGS, *TRAINING, *flags)

    return run


def test_a_round_prints_the_folder_of_the_adapter_and_runs_again_to_the_same(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    found = train()
    assert (found.status, found.out) == (0, f"{tmp_path / 'run' / 'adapter'}\n")
    assert (tmp_path / "run" / "adapter" / "pasta.json").is_file()
    kept = (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()
    assert len(kept) == 5, "the long prompt is left out"
    assert re.search(
        r"training round 1: step (\d+)/\1, loss \S+, \d+ tokens/s, 0:00:00 left", found.err
    )
    assert re.search(r"^finished: 1 rounds, \d+ pairs, \d+ s in all$", found.err, re.M)
    figures = train("--json").object
    assert figures["adapter"] == str(tmp_path / "run" / "adapter")
    assert figures["rounds"][0]["all"]["answers"] == 5 * 6
    assert {line["stage"] for line in figures["spent"]} >= {"baseline", "sample", "parts", "train"}


def test_infinity_takes_the_samples_of_another_lambda(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    assert train().status == 0
    flags = ["--lambda", "inf", "--samples-from", tmp_path / "run"]
    assert train(*flags, out=tmp_path / "inf").status == 0
    settings = json.loads((tmp_path / "inf" / "config.json").read_text())
    assert settings["lambda_"] is None
    samples = [tmp_path / name / "round-1" / "samples.jsonl" for name in ("run", "inf")]
    assert samples[0].read_text() == samples[1].read_text()


def test_an_interrupted_round_can_be_gone_on_with(
    train: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr("torch.optim.AdamW.step", interrupted)
        found = train()
    assert found.status == 130
    assert found.err.endswith("\npasta: interrupted: the same command goes on\n")
    assert not (tmp_path / "run" / "adapter").exists()
    assert (tmp_path / "run" / "round-1" / "reference.jsonl").is_file()
    assert train().status == 0


def test_other_settings_are_refused(train: Callable[..., Outcome], tmp_path: Path) -> None:
    assert train().status == 0
    found = train("--alpha", "0.5")
    assert found.status == 2
    assert f"{tmp_path / 'run'} was begun with other settings" in found.err


def test_a_round_without_a_pair_is_told_in_a_line(
    train: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pasta_decoding.training.preference.choose_pairs", lambda *_: [])
    found = train()
    assert (found.status, found.out) == (2, "")
    assert "pasta: round 1 has no pair of a better and a worse answer" in found.err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--lambda", "nan"], "greater than or equal to 0"),
        (["--engine", "llama"], "pasta: the llama engine needs llama-cpp-python"),
        (["--max-prompt-chars", "1"], "pasta: no prompt to answer"),
        (["--policy", "nobody"], "pasta: no adapter 'nobody'"),
        (["--model", "model.gguf"], "pasta: training does not start from a GGUF file"),
        (["--samples-from", "nowhere"], "pasta: nowhere holds no run"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(
    flags: list[str], complaint: str, train: Callable[..., Outcome]
) -> None:
    found = train(*flags)
    assert found.status == 2
    assert complaint in found.err
    assert found.out == ""


def test_it_does_not_run_as_several_processes(
    train: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = train()
    assert found.status == 2
    assert "pasta: train preference is one process: start it without accelerate launch" in found.err
