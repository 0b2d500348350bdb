"""`pasta train sft` on a tiny model: what it leaves behind, also when it cannot go on."""

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pasta_decoding.models.checkpoint import read_checkpoint
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta

FLAGS = ["--max-steps", "2", "--packs-per-step", "1"]
SETTINGS = {"base_name": "tiny", "save_every_steps": 1, "bf16": False, "try_prompts": 0}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    response = 'One: <promise topic="a" tokens="20"/><async>b</async>'
    row = {"id": "1", "source": "", "instruction": "i", "response": response}
    path.write_text(json.dumps(row))
    return path


@pytest.fixture
def train(pasta: Pasta, tiny_checkpoint: TinyCheckpoint, rows: Path, tmp_path: Path) -> Pasta:
    """Return a function that trains two steps into `run`; named paths take the place of its own."""
    file = tmp_path.parent / f"{tmp_path.name}.yaml"

    def run(*flags: str, settings: dict[str, object] | None = None, **paths: Path) -> Outcome:
        file.write_text(json.dumps(SETTINGS | (settings or {})))
        path_of_flag = {
            "data": rows,
            "out": tmp_path / "run",
            "model": tiny_checkpoint.base,
        } | paths
        where = [part for name, path in path_of_flag.items() for part in (f"--{name}", path)]
        return pasta("train", "sft", *where, "--config", file, *FLAGS, *flags)

    return run


def test_an_adapter_says_how_it_was_trained_and_one_that_goes_on_from_it_says_the_same(
    train: Pasta, tmp_path: Path
) -> None:
    trained_as = {"scheme": "reserve", "topic": "none"}
    assert train("--join", "text", "--join", "kv", settings=trained_as).status == 0
    for number, start in enumerate(("run", "run/checkpoint-1")):
        out = tmp_path / f"next-{number}"
        assert train("--max-steps", "1", start=tmp_path / start, out=out).status == 0
        checkpoint = read_checkpoint(out / "adapter")
        assert (checkpoint.scheme, checkpoint.topic) == ("reserve", "none")
        assert checkpoint.joins == ("text", "kv")
    assert train("--join", "kv", start=tmp_path / "run", out=tmp_path / "kv").status == 0
    assert read_checkpoint(tmp_path / "kv" / "adapter").joins == ("kv",)


@pytest.mark.parametrize(
    "command",
    [
        "sft --data {0} --start {1}",
        "preference --prompts {0} --policy {1} --baseline {1} --quality likelihood --replay {0}",
    ],
)
def test_without_a_model_the_base_is_that_of_the_adapter(
    command: str, pasta: Pasta, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    flags = command.format(rows, "qwen2.5-coder-1.5b").split()
    outcome = pasta("train", *flags, "--out", tmp_path / "run")
    assert outcome.complaint[1].startswith("pasta: the model qwen2.5-coder-1.5b is not in ")


def test_a_runs_own_settings_begin_another_and_the_command_line_stands_above_them(
    pasta: Pasta, train: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    assert train("--seed", "3", "--epochs", "4").status == 0
    config = tmp_path / "run" / "config.json"
    out = tmp_path / "again"
    where = ["--config", config, "--out", out, "--model", tiny_checkpoint.base]
    assert pasta("train", "sft", *where, "--epochs", "3").status == 0
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (out, config.parent)
    )
    assert ours == theirs | {"epochs": 3}


def test_a_run_tells_how_far_it_is_what_it_came_to_and_where_its_adapter_is(
    train: Pasta, rows: Path, tmp_path: Path
) -> None:
    outcome = train("--eval-data", str(rows))
    assert outcome.out.splitlines()[-1] == str(tmp_path / "run" / "adapter")
    assert (tmp_path / "run" / "adapter" / "pasta.json").is_file()
    for pattern in (
        r"\d+ tokens in 2 packs, \d\d held out\n",
        "1 of 1 held-out prompts are trained on as well",
        r"step 2/2, loss \d\.\d{3}, \d+ tokens/s, 0:00:00 left\n",
        r"step 2/2, eval_loss \d\.\d{3}, ",
        r"finished: 2 steps, \d+ tokens, \d+ s, text_loss \d\..* eval_text_loss",
    ):
        assert re.search(pattern, outcome.err), pattern
    again = train("--eval-data", str(rows))
    assert again.out == outcome.out
    assert "this run is finished: 2 steps, " in again.err


@pytest.mark.parametrize("name", ["data", "out", "model"])
def test_a_path_that_does_not_work_is_named_and_no_run_is_begun(
    name: str, train: Pasta, rows: Path, tmp_path: Path
) -> None:
    outcome = train(**{name: rows / "inside"})
    assert outcome.status == 2
    assert "pasta: " in outcome.err
    assert str(rows / "inside") in outcome.err
    assert list(tmp_path.iterdir()) == [rows]


@contextmanager
def full_disk(largest_file_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_training_with_an_error_and_the_run_can_go_on(
    train: Pasta, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with full_disk(100_000):  # the adapter fits, and the optimiser's state does not
        outcome = train()
    assert outcome.status == 2
    assert f"pasta: cannot write the run in {out}: " in outcome.err
    assert outcome.err.endswith("the same command goes on from the last checkpoint.\n")
    assert not (out / "adapter").exists()
    assert train().status == 0
