"""Lengths and the promise get offsets to their logits, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.models.checkpoint import load
from pasta_decoding.models.loading import load_model
from pasta_decoding.training.adapter_files import CONFIG, WEIGHTS
from pasta_decoding.training.offsets import _places, _read, offset_logits
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
    found = offset_logits(
        adapter, base, answers(60), out, lengths={30: 3.0, 100: -3.0}, promise=2.0
    )
    assert found.promises == 180
    assert found.lengths[30].before < 0.1
    assert found.lengths[100].before > 0.4
    assert found.lengths[30].after > 0.3
    assert found.lengths[100].after < 0.1
    assert found.promise.before < found.promise.after
    again = offset_logits(out, base, answers(60), tmp_path / "same", lengths={})
    for share in (*again.lengths.values(), again.promise):
        assert share.before == share.after
    assert {length: share.before for length, share in again.lengths.items()} == pytest.approx(
        {length: share.after for length, share in found.lengths.items()}, abs=0.05
    ), "as it was written"
    assert again.promise.before == pytest.approx(found.promise.after, abs=0.05)


def test_a_sync_gets_its_offset_where_one_stands_and_not_elsewhere(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, base, out = tiny_checkpoint.adapter, tiny_checkpoint.base, tmp_path / "waiting"
    rows = [
        replace(row, response=f"{row.response}\n\n<sync/>So {n}.")
        for n, row in enumerate(answers(60))
    ]
    found = offset_logits(adapter, base, rows, out, lengths={}, sync=12.0)
    assert (found.promises, found.syncs) == (180, 60)
    assert found.sync is not None
    assert found.sync.before < 0.1
    assert found.sync.after > 0.8
    assert found.no_sync.after < 0.05
    again = offset_logits(out, base, rows, tmp_path / "same", lengths={20: 0.1})
    assert again.sync is not None
    assert again.sync.before == pytest.approx(found.sync.after, abs=0.05), "as it was written"
    assert again.promise.before == pytest.approx(found.promise.before, abs=0.02)


def test_only_the_rows_with_an_offset_change(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, out = tiny_checkpoint.adapter, tmp_path / "adjusted"
    offset_logits(
        adapter, tiny_checkpoint.base, answers(30), out, lengths={20: 1, 60: 2}, promise=-1
    )
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
    assert moved.sum() == 3


def test_a_promise_has_no_place_in_a_topic_and_topics_are_read_as_the_adapter_has_them(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    loaded = load_model(tiny_checkpoint.base, tiny_checkpoint.adapter)
    control = loaded.checkpoint.control
    for topic, inside in (("required", len("part 0")), ("none", 0)):
        reader = replace(loaded, checkpoint=replace(loaded.checkpoint, topic=topic))
        ((layout, _states),) = _read(reader, answers(1), print)
        places = _places(layout, control)
        main = [
            (label, place)
            for label, thread, place in zip(layout.label, layout.thread, places, strict=True)
            if thread == MAIN and label is not None
        ]
        opening = next(at for at, (label, _) in enumerate(main) if label == control.promise_open)
        found = [place for _, place in main[opening : opening + inside + 2]]
        assert found == ["promise", *[None] * inside, "length"]
        assert sum(place == "length" for place in places) == 3


def test_rows_that_cannot_be_read_are_named_and_left_out(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    broken = answers(1)[0]
    rows = [
        *answers(30),
        replace(broken, id="silent", instruction=""),
        replace(broken, id="broken", response='<promise topic="x" tokens="20"/> and on'),
    ]
    said: list[str] = []
    found = offset_logits(
        tiny_checkpoint.adapter,
        tiny_checkpoint.base,
        rows,
        tmp_path / "out",
        lengths={20: 1},
        say=said.append,
    )
    assert found.promises == 90
    assert [line.split(": ")[0] for line in said] == [
        "row silent left out",
        "row broken left out",
    ]


def test_what_cannot_be_adjusted_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter, base = tiny_checkpoint.adapter, tiny_checkpoint.base
    with pytest.raises(PastaError, match="exists already"):
        offset_logits(adapter, base, answers(30), tmp_path, lengths={20: 1})
    with pytest.raises(PastaError, match="the rows have 9 promises"):
        offset_logits(adapter, base, answers(3), tmp_path / "few", lengths={20: 1})
    with pytest.raises(PastaError, match="the rows have 0 syncs"):
        offset_logits(adapter, base, answers(30), tmp_path / "few", lengths={}, sync=1.0)
    assert not (tmp_path / "few").exists()
    with pytest.raises(PastaError, match="25 is not a length") as caught:
        offset_logits(adapter, base, answers(30), tmp_path / "none", lengths={25: 1})
    assert caught.value.hint.startswith("Known: 20, 30, ")
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    shutil.copy(adapter / "pasta.json", whole)
    with pytest.raises(PastaError, match="whole holds no adapter_model"):
        offset_logits(whole, base, answers(30), tmp_path / "none", lengths={20: 1})
