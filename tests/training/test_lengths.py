"""Lengths are promised about as often as chunks have them, and nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import load
from pasta_decoding.training.average import CONFIG, WEIGHTS
from pasta_decoding.training.lengths import RARE, adjust_lengths
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


def test_shares_move_towards_those_that_chunks_have(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, out = tiny_checkpoint.adapter, tmp_path / "adjusted"
    found = adjust_lengths(adapter, tiny_checkpoint.base, answers(60), out, by=0.8)
    assert found.promises == 180
    for bucket, share in found.after.items():
        wanted = 0.2 * found.before[bucket] + 0.8 * found.probable[bucket]
        if found.probable[bucket] >= RARE:
            assert share == pytest.approx(wanted, abs=0.03), bucket
    assert found.before[30] < RARE < found.after[30], "one that greedy decoding passed over"
    again = adjust_lengths(out, tiny_checkpoint.base, answers(60), tmp_path / "same", by=0)
    assert again.before == again.after
    assert again.before == pytest.approx(found.after, abs=0.05), "as it was written"


def test_only_the_rows_of_lengths_change(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    adapter, out = tiny_checkpoint.adapter, tmp_path / "adjusted"
    adjust_lengths(adapter, tiny_checkpoint.base, answers(30), out, by=1)
    assert load(out) == load(adapter)
    assert (out / CONFIG).read_bytes() == (adapter / CONFIG).read_bytes()
    before, after = load_file(adapter / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert len(changed) == 1
    (name,) = changed
    assert after[name].dtype == before[name].dtype
    moved = (before[name] != after[name]).any(1)
    lengths = len(load(adapter).control.promise_close)
    assert 0 < moved.sum() <= lengths < len(moved)


def test_what_cannot_be_adjusted_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, base = tiny_checkpoint.adapter, tiny_checkpoint.base
    with pytest.raises(PastaError, match="exists already"):
        adjust_lengths(adapter, base, answers(30), tmp_path, by=1)
    with pytest.raises(PastaError, match="the rows have 9 promises"):
        adjust_lengths(adapter, base, answers(3), tmp_path / "few", by=1)
    assert not (tmp_path / "few").exists()
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    shutil.copy(adapter / "pasta.json", whole)
    with pytest.raises(PastaError, match="is a whole model"):
        adjust_lengths(whole, base, answers(30), tmp_path / "none", by=1)
