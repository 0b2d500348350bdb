"""What one hears of a run: progress, held-out losses, trackers, interruptions, its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.load import find_adapter, load_base, load_model
from pasta_decoding.training import sft
from pasta_decoding.training.loop import GOES_ON, Progress
from pasta_decoding.training.loss import score_layouts
from pasta_decoding.training.sft import compile_rows, train_sft
from tests.checkpoint import END_ID, TinyCheckpoint, byte_tokenizer
from tests.training.test_sft import CONFIG, ROWS, files, losses

SHORT = replace(CONFIG, max_steps=7, save_every_steps=3)
HELD_OUT = ROWS[2:]


def quiet(_line: str) -> None:
    """Say nothing."""


def test_progress_is_told_behind_every_forward_pass(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    told: list[Progress] = []
    train_sft(
        SHORT,
        ROWS,
        base=tiny_checkpoint.base,
        out=tmp_path,
        say=quiet,
        held_out=HELD_OUT,
        show=told.append,
    )
    tokens = [one.tokens for one in told]
    assert tokens == sorted(tokens)
    assert (tokens[0], told[0].loss, told[0].left_s) == (0, None, None)
    assert len(set(tokens)) == 1 + 7 * SHORT.packs_per_step
    last = told[-1]
    assert (last.step, last.steps, last.tokens, last.left_s) == (7, 7, last.all_tokens, 0)
    assert last.tokens_per_s > 0
    lines = read_lines(tmp_path / "metrics.jsonl")
    held_out = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(held_out) == [3, 6, 7]
    assert last.held_out == pytest.approx(held_out[7])
    assert last.loss is not None
    assert 0 < last.loss < 10


def test_the_held_out_loss_is_the_mean_over_the_labels_of_the_rows(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """At a learning rate of 0 the model stays the base model."""
    still = replace(SHORT, learning_rate=0.0, max_steps=1)
    train_sft(still, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=quiet, held_out=HELD_OUT)
    tokenizer = byte_tokenizer()
    control = choose_tokens(tokenizer)
    layouts = compile_rows(HELD_OUT, tokenizer, control, still, print, end=END_ID)
    model, _ = load_base(tiny_checkpoint.base, dtype="float32")
    expected = -torch.cat(list(score_layouts(model, layouts)))
    line = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert line["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert set(line) == {"step", "eval_loss", "eval_text_loss", "eval_control_loss", "seconds"}


def test_looking_at_held_out_rows_changes_nothing_that_is_trained(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    blind, looking = tmp_path / "blind", tmp_path / "looking"
    base = tiny_checkpoint.base
    train_sft(SHORT, ROWS, base=base, out=blind, say=quiet)
    train_sft(SHORT, ROWS, base=base, out=looking, say=quiet, held_out=HELD_OUT)
    trained = [line for line in losses(looking) if "loss" in line]
    assert trained == losses(blind)
    assert files(looking / "adapter") == files(blind / "adapter")


@pytest.fixture
def control_c_in_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Ctrl-C within the fourth step of an optimiser, as at a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    step, steps = torch.optim.AdamW.step, 0

    def interrupted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments)

    with monkeypatch.context() as context:
        context.setattr(torch.optim.AdamW, "step", interrupted)
        yield context
    signal.signal(signal.SIGINT, before)


def test_control_c_keeps_the_step_and_the_same_command_goes_on_to_the_same_adapter(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, control_c_in_step: pytest.MonkeyPatch
) -> None:
    base, out, whole = tiny_checkpoint.base, tmp_path / "out", tmp_path / "whole"
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt, match=GOES_ON):
        train_sft(SHORT, ROWS, base=base, out=out, say=said.append)
    assert said[-1] == "stopping behind this step; Ctrl-C again stops at once"
    assert (out / "checkpoint-4" / "trainer_state.json").is_file()
    assert not (out / "adapter").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    control_c_in_step.undo()
    with pytest.raises(PastaError, match="is not finished: it holds no adapter yet"):
        find_adapter(str(out))
    train_sft(SHORT, ROWS, base=base, out=out, say=quiet)
    train_sft(SHORT, ROWS, base=base, out=whole, say=quiet)
    assert files(out / "adapter") == files(whole / "adapter")


def test_a_second_control_c_stops_at_once(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, control_c_in_step: pytest.MonkeyPatch
) -> None:
    def twice(line: str) -> None:
        if line.startswith("stopping"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=GOES_ON):
        train_sft(SHORT, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=twice)
    control_c_in_step.undo()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_finished_run_says_its_figures_and_is_not_trained_again(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_checkpoint.base
    said: list[str] = []
    adapter = train_sft(SHORT, ROWS, base=base, out=tmp_path, say=said.append, held_out=HELD_OUT)
    finished = said[-1]
    last = losses(tmp_path)[-2] | losses(tmp_path)[-1]
    assert finished.startswith("finished: 7 steps, ")
    assert finished.endswith(
        f" s; last losses: text {last['text_loss']:.3f}, control tokens {last['control_loss']:.3f},"
        f" held-out text {last['eval_text_loss']:.3f},"
        f" held-out control tokens {last['eval_control_loss']:.3f}"
    )
    monkeypatch.delattr(sft, "_train")
    again = train_sft(SHORT, ROWS, base=base, out=tmp_path, say=said.append, held_out=HELD_OUT)
    assert again == adapter == find_adapter(str(tmp_path))
    assert said[-1] == f"this run is {finished}"


def test_each_checkpoint_can_be_decoded_with(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    train_sft(SHORT, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=quiet)
    folder = find_adapter(str(tmp_path / "checkpoint-6"))
    loaded = load_model(tiny_checkpoint.base, folder)
    assert loaded.checkpoint == checkpoints.load(tmp_path / "adapter")


def test_a_tracker_is_told_all_losses(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, set[str]] = {}

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            told.setdefault(state.global_step, set()).update(kwargs["logs"])

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    train_sft(
        SHORT,
        ROWS,
        base=tiny_checkpoint.base,
        out=tmp_path,
        say=quiet,
        held_out=HELD_OUT,
        report_to=["tensorboard"],
    )
    assert {"loss", "text_loss", "control_loss", "learning_rate"} <= told[5]
    assert {"eval_loss", "eval_text_loss", "eval_control_loss"} <= told[6]
