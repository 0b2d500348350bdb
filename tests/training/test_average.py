"""The mean of adapters: its tensors, what it says of itself, and what cannot be averaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import load
from pasta_decoding.training.adapter_files import CONFIG, WEIGHTS
from pasta_decoding.training.average import average
from tests.checkpoint import TinyCheckpoint


def variant(adapter: Path, folder: Path, add: float, **record: object) -> Path:
    """Copy an adapter, with something added to all its numbers and its record changed."""
    shutil.copytree(adapter, folder)
    tensors = {name: one + add for name, one in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    path = folder / "pasta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    return folder


@pytest.fixture
def one(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return variant(tiny_checkpoint.adapter, tmp_path / "one", 0, joins=["kv", "text"])


def test_every_tensor_is_the_weighted_mean_and_the_joins_are_those_of_all(
    one: Path, tmp_path: Path
) -> None:
    two = variant(one, tmp_path / "two", 1.0, joins=["kv"])
    out = average([(one, 0.25), (two, 0.75)], tmp_path / "mean")
    first, mean = load_file(one / WEIGHTS), load_file(out / WEIGHTS)
    assert mean.keys() == first.keys()
    for name, tensor in mean.items():
        assert tensor.dtype == first[name].dtype
        torch.testing.assert_close(tensor, first[name] + 0.75)
    assert load(out).joins == ("kv",)
    assert load(out).control == load(one).control
    assert json.loads((out / CONFIG).read_text()) == json.loads((one / CONFIG).read_text())


@pytest.mark.parametrize(
    ("record", "complaint"),
    [({"joins": ["text"]}, "no join"), ({"scheme": "reserve", "joins": ["kv"]}, "scheme")],
)
def test_what_is_of_another_kind_is_refused(
    one: Path, tmp_path: Path, record: dict[str, object], complaint: str
) -> None:
    first = variant(one, tmp_path / "first", 0, joins=["kv"])
    two = variant(one, tmp_path / "two", 1.0, **record)
    with pytest.raises(PastaError, match=complaint):
        average([(first, 0.5), (two, 0.5)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_other_shapes_and_missing_or_broken_weights_are_refused(one: Path, tmp_path: Path) -> None:
    two = variant(one, tmp_path / "two", 0)
    name, *_ = tensors = load_file(one / WEIGHTS)
    save_file(tensors | {name: torch.zeros(1)}, two / WEIGHTS)
    with pytest.raises(PastaError, match="other tensors"):
        average([(one, 0.5), (two, 0.5)], tmp_path / "mean")
    (two / WEIGHTS).write_text("no tensors")
    with pytest.raises(PastaError, match="cannot be read"):
        average([(one, 0.5), (two, 0.5)], tmp_path / "mean")
    (two / WEIGHTS).unlink()
    with pytest.raises(PastaError, match="holds no"):
        average([(one, 0.5), (two, 0.5)], tmp_path / "mean")


def test_weights_add_to_one_and_nothing_is_written_over(one: Path, tmp_path: Path) -> None:
    with pytest.raises(PastaError, match=r"add up to 1\.2"):
        average([(one, 0.6), (one, 0.6)], tmp_path / "mean")
    with pytest.raises(PastaError, match="exists"):
        average([(one, 1.0)], one)


def test_another_scale_of_the_same_tensors_is_refused(one: Path, tmp_path: Path) -> None:
    two = variant(one, tmp_path / "two", 0)
    config = json.loads((one / CONFIG).read_text())
    (two / CONFIG).write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 2}))
    with pytest.raises(PastaError, match="lora_alpha"):
        average([(one, 0.5), (two, 0.5)], tmp_path / "mean")
    (two / CONFIG).unlink()
    with pytest.raises(PastaError, match="holds no adapter_config"):
        average([(one, 0.5), (two, 0.5)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
