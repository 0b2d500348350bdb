"""A run on the way: progress, held-out losses, trackers, interruptions, numbers that are none."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import BaseAlone, find_adapter
from pasta_decoding.models.load import load_base
from pasta_decoding.training.examples import compile_rows
from pasta_decoding.training.view import score_layouts
from tests.checkpoint import TinyCheckpoint
from tests.training.tiny_runs import CONFIG, ROWS, behind_step, files, losses, spoil, train

HELD_OUT = ROWS[2:]


def test_looking_on_changes_nothing_and_tells_files_and_trackers(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked_names: dict[int, set[str]] = {}

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            tracked_names.setdefault(state.global_step, set()).update(kwargs["logs"])

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    config = replace(CONFIG, report_to=("tensorboard",))
    train(tiny_checkpoint.base, tmp_path, config, held_out=HELD_OUT)
    lines = losses(tmp_path)
    assert [line for line in lines if "loss" in line] == losses(finished)
    assert files(tmp_path / "adapter") == files(finished / "adapter")
    assert {"loss", "text_loss", "control_loss", "learning_rate"} <= tracked_names[5]
    assert {"eval_loss", "eval_text_loss", "eval_control_loss"} <= tracked_names[5]


def test_the_held_out_loss_is_the_mean_over_the_labels_of_the_rows(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """At a learning rate of 0 the model stays the base model."""
    still = replace(CONFIG, learning_rate=0.0, max_steps=1)
    train(tiny_checkpoint.base, tmp_path, still, held_out=HELD_OUT)
    loaded = load_base(BaseAlone(tiny_checkpoint.base))
    layouts = compile_rows(HELD_OUT, loaded, still)
    expected = -torch.cat(list(score_layouts(loaded.model, layouts)))
    line = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert line["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as Python has it outside of tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def control_c(_optimizer: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("at_a_terminal")
def test_a_signal_keeps_the_step_and_the_same_command_goes_on_to_the_same_adapter(
    number: signal.Signals, tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    """Those of Ctrl-C, of `docker stop` and Slurm, and of a terminal that closes."""
    previous_handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), behind_step(4, lambda _: os.kill(os.getpid(), number)):
        train(tiny_checkpoint.base, tmp_path)
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()
    assert signal.getsignal(number) == previous_handler
    with pytest.raises(PastaError, match="is not finished: it holds no adapter yet"):
        find_adapter(str(tmp_path))
    train(tiny_checkpoint.base, tmp_path)
    assert files(tmp_path / "adapter") == files(finished / "adapter")


def test_a_run_under_nohup_goes_on_when_the_terminal_closes(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with behind_step(4, lambda _: os.kill(os.getpid(), signal.SIGHUP)):
            train(tiny_checkpoint.base, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
    assert files(tmp_path / "adapter") == files(finished / "adapter")


@pytest.mark.usefixtures("at_a_terminal")
def test_a_second_control_c_stops_at_once(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def twice(_optimizer: Any) -> None:
        control_c()
        control_c()

    with pytest.raises(KeyboardInterrupt), behind_step(2, twice):
        train(tiny_checkpoint.base, tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_loss_that_is_no_number_stops_the_run_at_its_step_and_names_the_last_good_state(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    base = tiny_checkpoint.base
    with pytest.raises(PastaError) as caught, behind_step(6, spoil):
        train(base, out)
    good = out / "checkpoint-5"
    assert str(caught.value) == "the loss is not a number at step 7"
    assert caught.value.hint == (
        "Begin again in another --out with a lower --learning-rate. "
        f"--start {good} goes on from the last good state."
    )
    assert not (out / "adapter").exists()
    weights = load_file(good / "adapter_model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    # What the hint says works.
    on = replace(CONFIG, start=str(good), learning_rate=1e-3, max_steps=1)
    assert (train(base, tmp_path / "on", on) / "pasta.json").is_file()


def test_weights_that_are_no_numbers_are_never_saved(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """The loss of a step is computed before its weights go wrong; only they show it."""
    with pytest.raises(PastaError) as caught, behind_step(5, spoil):
        train(tiny_checkpoint.base, tmp_path)
    assert str(caught.value) == "weights are no longer numbers after step 5"
    assert caught.value.hint == "Begin again in another --out with a lower --learning-rate."
    assert not list(tmp_path.glob("checkpoint-*"))
