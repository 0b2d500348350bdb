"""Merging without peft: the same weights as peft's own merge, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.adapter import merge_adapter, read_added
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.load import find_adapter, load_base
from pasta_decoding.training.lora import add_lora, save_adapter
from tests.checkpoint import TinyCheckpoint, byte_tokenizer
from tests.tiny import TINY_MODELS, seeded


def assert_alike(ours: Any, theirs: Any) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def saved(model: Any, folder: Path, *, rank: int = 3) -> Path:
    """Save a random adapter for a model, control-token rows and all."""
    tokenizer = byte_tokenizer()
    control = choose_tokens(tokenizer)
    checkpoint = checkpoints.describe(model, tokenizer, control, name="tests/tiny")
    with seeded(1):
        lora = add_lora(model, control, rank=rank, seed=0)
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return save_adapter(lora, checkpoint, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_merged_weights_are_those_of_peft(
    name: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    def base() -> Any:
        model: Any = TINY_MODELS[name](vocabulary=272, tie_word_embeddings=tied)
        return model.to(dtype)

    adapter = saved(TINY_MODELS[name](vocabulary=272, tie_word_embeddings=tied), tmp_path / "a")
    ours, untouched = merge_adapter(base(), adapter), base()
    assert_alike(ours, PeftModel.from_pretrained(base(), str(adapter)).merge_and_unload())
    changed = [
        key for key, weight in ours.state_dict().items()
        if not torch.equal(weight, untouched.state_dict()[key])
    ]  # fmt: skip
    assert len(changed) > 14


@pytest.mark.parametrize("name", ["balanced", "sequential"])
def test_shipped_adapters_are_merged_as_peft_does(name: str, default_model_dir: Path) -> None:
    adapter = find_adapter(name)
    ours = merge_adapter(load_base(default_model_dir, dtype="float32")[0], adapter)
    theirs = PeftModel.from_pretrained(
        load_base(default_model_dir, dtype="float32")[0], str(adapter)
    ).merge_and_unload()
    assert_alike(ours, theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
@torch.no_grad()
def test_what_an_adapter_adds_apart_is_what_merging_adds(
    name: str, tied: bool, tmp_path: Path
) -> None:
    def base() -> Any:
        return TINY_MODELS[name](vocabulary=272, tie_word_embeddings=tied)

    adapter, model = saved(base(), tmp_path / "a"), base()
    added = read_added(dict(model.named_parameters()), adapter)
    assert_alike(model, base())
    merged = merge_adapter(base(), adapter)
    linears = {key: one for key, one in model.named_modules() if isinstance(one, nn.Linear)}
    assert added.keys() == {*linears, "model.embed_tokens"}
    for key, (down_RI, up_OR) in added.items():
        whole = model.get_submodule(key).weight + up_OR.float() @ down_RI.float()
        torch.testing.assert_close(whole, merged.get_submodule(key).weight)


def test_an_adapter_of_a_tied_copy_changes_the_head_of_an_untied_one_too(tmp_path: Path) -> None:
    """A hub's copy ties its head; a GGUF's, rounded by itself, does not."""

    def base(tied: bool) -> Any:
        return TINY_MODELS["llama"](vocabulary=272, tie_word_embeddings=tied)

    untied = base(False)
    untied.lm_head.weight.data.copy_(untied.model.embed_tokens.weight)
    adapter = saved(base(True), tmp_path / "a")
    theirs = merge_adapter(base(True), adapter)
    assert torch.equal(merge_adapter(untied, adapter).lm_head.weight, theirs.lm_head.weight)


def test_an_adapter_of_another_kind_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter = Path(shutil.copytree(tiny_checkpoint.adapter, tmp_path / "dora"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    model, _ = load_base(tiny_checkpoint.base, dtype="float32")
    with pytest.raises(PastaError, match="does not merge") as caught:
        merge_adapter(model, adapter)
    assert "use_dora" in str(caught.value)


def test_weights_that_fit_nowhere_are_told(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    other = TINY_MODELS["llama"](vocabulary=272, num_hidden_layers=3)
    adapter = saved(other, tmp_path / "deeper")
    model, _ = load_base(tiny_checkpoint.base, dtype="float32")
    with pytest.raises(PastaError, match="cannot be loaded"):
        merge_adapter(model, adapter)
