"""A run that leaves the numbers stops, says where, and leaves its last good checkpoint alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pasta_decoding.errors import PastaError
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.sft import train_sft
from tests.checkpoint import TinyCheckpoint
from tests.training.test_sft import CONFIG, ROWS


def spoil(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the optimiser's step number `after` make one weight NaN."""
    step = torch.optim.AdamW.step
    steps = 0

    def spoiled(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        found = step(self, *arguments)
        steps += 1
        if steps == after:
            self.param_groups[0]["params"][0].data.view(-1)[0] = torch.nan
        return found

    monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)


def failure(config: SftConfig, checkpoint: TinyCheckpoint, out: Path) -> PastaError:
    with pytest.raises(PastaError) as caught:
        train_sft(config, ROWS, base=checkpoint.base, out=out, say=lambda _line: None)
    return caught.value


def test_a_loss_that_is_no_number_stops_the_run_at_its_step_and_names_the_last_good_state(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as context:
        spoil(context, after=12)
        error = failure(CONFIG, tiny_checkpoint, out)
    good = out / "checkpoint-10"
    assert str(error) == "the loss is not a number at step 13"
    assert error.hint == (
        f"The last good state is {good}. Go on from there with --start {good}, another --out and "
        "a lower --learning-rate."
    )
    assert not (out / "adapter").exists()
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-10"]
    assert all(weight.isfinite().all() for weight in weights_of(good).values())
    # What the hint says works.
    on = replace(CONFIG, start=str(good), learning_rate=1e-3, max_steps=2)
    adapter = train_sft(
        on, ROWS, base=tiny_checkpoint.base, out=tmp_path / "on", say=lambda _line: None
    )
    assert (adapter / "pasta.json").is_file()


def test_weights_that_are_no_numbers_are_never_saved(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is computed before its weights go wrong; only they show it."""
    spoil(monkeypatch, after=10)
    error = failure(CONFIG, tiny_checkpoint, tmp_path / "run")
    assert str(error) == "weights are no longer numbers after step 10"
    assert error.hint == "Begin again in another --out with a lower --learning-rate."
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
