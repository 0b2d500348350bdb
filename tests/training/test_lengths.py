"""Lengths get offsets to their logits, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import load
from pasta_decoding.training.adapter_files import CONFIG, WEIGHTS
from pasta_decoding.training.lengths import offset_lengths
from tests.checkpoint import TinyCheckpoint

CHUNK = '<promise topic="part {n}" tokens="20"/><async>{text}</async>'


def answers(number: int) -> list[Row]:
    """Rows of three promises each; a token a byte, so chunks have 10 to 60 tokens."""
    return [
        Row(
            id=f"r{n}",
            source="made",
            instruction=f"What are the parts of {n}?",
            response=" ".join(
                CHUNK.format(n=part, text="x" * (10 + (7 * n + 20 * part) % 50))
                for part in range(3)
            ),
        )
        for n in range(number)
    ]


def test_an_offset_is_what_the_logit_gets(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    adapter, base, out = tiny_checkpoint.adapter, tiny_checkpoint.base, tmp_path / "adjusted"
    found = offset_lengths(adapter, base, answers(60), out, {30: 3.0, 100: -3.0})
    assert found.promises == 180
    assert found.before[30] < 0.1
    assert found.before[100] > 0.4
    assert found.after[30] > 0.3
    assert found.after[100] < 0.1
    again = offset_lengths(out, base, answers(60), tmp_path / "same", {})
    assert again.before == again.after
    assert again.before == pytest.approx(found.after, abs=0.05), "as it was written"


def test_only_the_rows_of_lengths_change(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    adapter, out = tiny_checkpoint.adapter, tmp_path / "adjusted"
    offset_lengths(adapter, tiny_checkpoint.base, answers(30), out, {20: 1, 60: 2})
    assert load(out) == load(adapter)
    settings = [json.loads((one / CONFIG).read_text()) for one in (out, adapter)]
    assert settings[0] == settings[1]
    before, after = load_file(adapter / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert len(changed) == 1
    (name,) = changed
    assert after[name].dtype == before[name].dtype
    moved = (before[name] != after[name]).any(1)
    assert moved.sum() == 2


def test_what_cannot_be_adjusted_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, base = tiny_checkpoint.adapter, tiny_checkpoint.base
    with pytest.raises(PastaError, match="exists already"):
        offset_lengths(adapter, base, answers(30), tmp_path, {20: 1})
    with pytest.raises(PastaError, match="the rows have 9 promises"):
        offset_lengths(adapter, base, answers(3), tmp_path / "few", {20: 1})
    assert not (tmp_path / "few").exists()
    with pytest.raises(PastaError, match="25 is not a length") as caught:
        offset_lengths(adapter, base, answers(30), tmp_path / "none", {25: 1})
    assert caught.value.hint.startswith("Known: 20, 30, ")
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    shutil.copy(adapter / "pasta.json", whole)
    with pytest.raises(PastaError, match="whole holds no adapter_model"):
        offset_lengths(whole, base, answers(30), tmp_path / "none", {20: 1})
