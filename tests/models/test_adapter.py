"""Merging without peft: the same weights as peft's own merge, bit by bit."""

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
from pasta_decoding.models.adapter import merge_adapter, read_layer_updates
from pasta_decoding.models.catalog import BaseAlone
from pasta_decoding.models.checkpoint import choose_tokens
from pasta_decoding.models.load import LoadedModel, load_base
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.lora import add_lora, save
from tests.checkpoint import TinyCheckpoint, byte_tokenizer
from tests.tiny import TINY_MODELS, seeded


def saved(model: Any, folder: Path, *, rank: int = 3) -> Path:
    """Save a random adapter for a model, control-token rows and all."""
    tokenizer = byte_tokenizer()
    control = choose_tokens(tokenizer)
    record = checkpoints.describe(model, tokenizer, control, name="tests/tiny")
    with seeded(1):
        lora = add_lora(model, control, SftConfig(lora_rank=rank))
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return save(LoadedModel(lora, tokenizer, record, frozenset()), folder)


@pytest.mark.parametrize(
    ("name", "tied", "dtype"),
    [
        ("llama", True, torch.float32),
        ("llama", False, torch.bfloat16),
        ("qwen2", True, torch.bfloat16),
        ("qwen3", False, torch.float32),
        ("gemma3", True, torch.float32),
    ],
)
@torch.no_grad()
def test_merged_weights_are_those_of_peft_and_the_base_plus_the_layer_updates(
    name: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    def base() -> Any:
        model: Any = TINY_MODELS[name](vocabulary=272, tie_word_embeddings=tied)
        return model.to(dtype)

    adapter = saved(TINY_MODELS[name](vocabulary=272, tie_word_embeddings=tied), tmp_path / "a")
    ours = merge_adapter(base(), adapter)
    untouched = base()
    theirs = PeftModel.from_pretrained(base(), str(adapter)).merge_and_unload()
    before = untouched.state_dict()
    after = ours.state_dict()
    expected = theirs.state_dict()
    assert after.keys() == expected.keys()
    assert [name for name in after if not torch.equal(after[name], expected[name])] == []
    assert sum(not torch.equal(after[name], before[name]) for name in after) > 14
    added = read_layer_updates(dict(untouched.named_parameters()), adapter)
    modules = untouched.named_modules()
    linears = {name for name, module in modules if isinstance(module, nn.Linear)}
    assert added.keys() == linears | {"model.embed_tokens"}
    for key, (down_RI, up_OR) in added.items():
        merged = before[f"{key}.weight"] + up_OR.float() @ down_RI.float()
        torch.testing.assert_close(merged.to(dtype), after[f"{key}.weight"])


def test_an_adapter_of_another_kind_or_another_shape_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model = load_base(BaseAlone(tiny_checkpoint.base)).model
    adapter = Path(shutil.copytree(tiny_checkpoint.adapter, tmp_path / "dora"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(PastaError, match="uses use_dora, which Pasta does not merge"):
        merge_adapter(model, adapter)
    deeper = saved(TINY_MODELS["llama"](vocabulary=272, num_hidden_layers=3), tmp_path / "deeper")
    with pytest.raises(PastaError, match=r"^the adapter in .*deeper cannot be loaded: "):
        merge_adapter(model, deeper)
