"""The estimate of memory against models that exist, and against tensors that do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pasta_decoding.models.control_tokens import BUCKETS, choose_tokens
from pasta_decoding.training.lora import add_lora
from scripts.memory import KERNEL, count_model, estimate, measure, saved_bytes
from scripts.memory_table import SHAPES
from tests.checkpoint import byte_tokenizer
from tests.tiny import tiny_gemma3, tiny_llama

TOKENS = 64
PUBLISHED = {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}


@pytest.mark.parametrize("name", SHAPES)
def test_the_models_of_the_table_have_the_parameters_that_are_published(name: str) -> None:
    found = measure(SHAPES[name], tokens=TOKENS, lora_rank=0).whole
    assert found.parameters == found.trained == PUBLISHED[name.split(maxsplit=1)[0]]


def deep(layers: int = 5) -> Any:
    return tiny_llama(num_hidden_layers=layers, tie_word_embeddings=True).config


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_gradients_and_optimiser_state_are_the_bytes_that_a_step_makes(rank: int) -> None:
    config = deep()
    need = estimate(measure(config, tokens=TOKENS, lora_rank=rank), gpus=1, recompute=False)
    dtype = torch.bfloat16 if rank else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if rank:
        control = replace(choose_tokens(byte_tokenizer()), sync=1)
        control = replace(control, promise_open=2, async_open=3, async_close=4)
        closes = dict(zip(BUCKETS, range(5, 99), strict=False))
        model = add_lora(model, replace(control, promise_close=closes), rank=rank, seed=0)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.float().sum().backward()
    optimiser.step()
    moments = [one for state in optimiser.state.values() for one in state.values() if one.dim()]
    assert need.weights == size(list(model.parameters()))
    assert need.gradients == size([one.grad for one in trained])
    assert need.optimiser == size(moments)


def size(tensors: list[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_deeper_model_is_foretold_from_one_layer_and_two(rank: int, make: Any) -> None:
    config = make().config
    foretold = measure(config, tokens=TOKENS, lora_rank=rank)
    for depth in (1, 2):
        counted = count_model(config, depth, TOKENS, rank)
        assert counted == foretold.rest + foretold.layer.times(depth)
    deeper = deep(5)
    foretold = measure(deeper, tokens=TOKENS, lora_rank=rank)
    assert foretold.whole == count_model(deeper, 5, TOKENS, rank)


def test_what_is_kept_on_real_tensors_is_what_was_counted_without_them() -> None:
    model: Any = AutoModelForCausalLM.from_config(
        deep(), dtype=torch.bfloat16, attn_implementation=KERNEL
    )
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(input_ids=ids, position_ids=ids, use_cache=False).logits[0]
        loss = cross_entropy(logits.float(), ids[0])
    assert loss.requires_grad
    assert saved_bytes(model, TOKENS) == sum(one.nbytes() for one in kept.values())


def test_sharing_cuts_the_states_and_recomputing_the_activations() -> None:
    model = measure(deep(40), tokens=TOKENS, lora_rank=0)
    one = estimate(model, gpus=1, recompute=False)
    eight = estimate(model, gpus=8, recompute=True)
    assert eight.weights == one.weights // 8
    assert eight.optimiser == one.optimiser // 8
    assert eight.activations < one.activations / 4
    assert one.total == sum(
        (one.weights, one.gradients, one.optimiser, one.copies, one.activations, one.mask)
    )
