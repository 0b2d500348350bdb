"""What the torch engine promises beyond the contract: memory, work, and which models it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from pasta_decoding.engines.attention import KeyShape, PooledLayer, Span
from pasta_decoding.engines.base import Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from tests.engines.oracle import TOLERANCE, Recorder, assert_equals_recompute, dense
from tests.tiny import seeded, tiny_llama, tiny_qwen3

PROMPT = (5, 17, 42, 8)


def fork_join_go_on(record: Recorder) -> None:
    main = record.open(PROMPT)
    child, other = record.fork(main), record.fork(main)
    record.step(Feed((main, child), (90,), (4,)), Feed((child,), (91,), (5,)))
    record.step(*(Feed((b,), (20,), (6,)) for b in (main, child, other)))
    record.join(main, [child, other])
    record.step(Feed((main,), (30, 31), (7, 8)))
    record.close(main)


# --- work and memory ----------------------------------------------------------------------------


def test_every_token_is_computed_exactly_once() -> None:
    model, computed = tiny_llama(), []
    engine = TorchEngine(model)

    def count(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        computed.extend(arguments[0].flatten().tolist())

    model.get_input_embeddings().register_forward_pre_hook(count)
    record = Recorder(engine)
    fork_join_go_on(record)
    assert computed == record.ids


def test_the_head_computes_only_the_rows_that_are_wanted() -> None:
    model, rows = tiny_llama(), []
    engine = TorchEngine(model)

    def count(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        rows.append(arguments[0].shape[1])

    model.get_output_embeddings().register_forward_pre_hook(count)
    main = engine.open(room=13)
    engine.step([Feed((main,), PROMPT, (0, 1, 2, 3))])
    engine.step([Feed((main,), (1, 2, 3), (4, 5, 6))])
    engine.step([Feed((main,), (4,), (7,), wants_logits=False), Feed((main,), (5,), (8,))])
    assert rows == [1, 1, 1]


def living_layers() -> int:
    return sum(type(thing) is PooledLayer for thing in gc.get_objects())


def test_closing_the_last_branch_frees_the_keys_at_once() -> None:
    engine, before = TorchEngine(tiny_llama()), living_layers()
    main = engine.open(room=4)
    child = engine.fork(main)
    engine.close(main)
    assert living_layers() == before + 2
    engine.close(child)
    assert living_layers() == before


def test_the_pool_is_taken_once_and_written_in_place() -> None:
    span = Span(0, 3)
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 6)
    layer = PooledLayer(span, KeyShape(keys[0, :, :1], values[0, :, :1]), capacity=8)
    seen, _ = layer.update(keys, values)
    assert seen.shape == (1, 2, 3, 4)
    span.first, span.end = 3, 5
    seen_later, values_later = layer.update(keys[:, :, :2], values[:, :, :2])
    assert seen_later.data_ptr() == seen.data_ptr()
    assert torch.equal(seen_later, torch.cat([keys, keys[:, :, :2]], dim=2))
    assert torch.equal(values_later, torch.cat([values, values[:, :, :2]], dim=2))


def test_a_cache_that_does_not_fit_into_memory_is_refused() -> None:
    engine = TorchEngine(tiny_llama())
    with pytest.raises(PastaError, match=f"no memory on cpu for a cache of {10**13} tokens"):
        engine.open(room=10**13)
    assert engine.cells_in_use == 0


# --- exactness ----------------------------------------------------------------------------------


def test_one_cell_too_many_would_show() -> None:
    """The tolerance means something: it is far below what a wrong mask does."""
    record = Recorder(TorchEngine(tiny_llama()))
    fork_join_go_on(record)
    expected_TV = dense(tiny_llama())(record)
    sibling = record.seen[7][-1]
    record.seen[6].append(sibling)
    moved_TV = dense(tiny_llama())(record)
    assert np.abs(moved_TV - expected_TV)[6].max() > 100 * TOLERANCE


def test_a_bfloat16_model_keeps_its_type_and_gives_float32_rows() -> None:
    record = Recorder(TorchEngine(tiny_llama().bfloat16()))
    fork_join_go_on(record)
    tokens, rows = zip(*record.rows, strict=True)
    exact_FV = dense(tiny_llama())(record)[list(tokens)]
    assert rows[0].dtype == np.float32
    assert np.abs(np.stack(rows) - exact_FV).mean() < 0.05 * exact_FV.std()


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_model_taken_over_still_answers_a_plain_padded_call(
    make: Callable[[], PreTrainedModel],
) -> None:
    taken = make()
    TorchEngine(taken)
    ids, mask = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]]), torch.tensor([[1] * 4, [0, 0, 1, 1]])
    with torch.no_grad():
        got, expected = (m(ids, attention_mask=mask).logits for m in (taken, make()))
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=TOLERANCE)


def test_queries_that_share_a_key_head_need_not_be_grouped() -> None:
    record = Recorder(TorchEngine(tiny_llama(num_key_value_heads=4)))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(tiny_llama(num_key_value_heads=4)))


# peft asks transformers under a name that is going away.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_need_not_be_merged() -> None:
    def adapted() -> PreTrainedModel:
        with seeded(1):
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            return cast(PreTrainedModel, get_peft_model(tiny_llama(), lora))

    record = Recorder(TorchEngine(adapted()))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(adapted()))


# --- refusals -----------------------------------------------------------------------------------

NO_ROPE = "it has no rotary positions (RoPE)"
RECURRENT = "it has recurrent layers, whose state cannot be forked and joined"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, NO_ROPE),
    "opt": ({"hidden_size": 32, "word_embed_proj_dim": 32, "num_attention_heads": 4}, NO_ROPE),
    "bloom": ({"hidden_size": 32, "n_layer": 1, "n_head": 4}, NO_ROPE),
    "mpt": ({"d_model": 32, "n_layers": 1, "n_heads": 4}, NO_ROPE),
    "falcon": ({"hidden_size": 32, "num_attention_heads": 4, "alibi": True}, NO_ROPE),
    "mistral": (
        SMALL | {"sliding_window": 64},
        "its attention is not full but limited by a sliding window of 64 tokens",
    ),
    "qwen2": (
        SMALL | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "its attention is not full but limited by sliding_attention",
    ),
    "gemma2": (SMALL, "its attention is not full but limited by sliding_attention"),
    "gemma3_text": (SMALL, "its attention is not full but limited by sliding_attention"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 1}, RECURRENT),
    "rwkv": ({"hidden_size": 32, "num_hidden_layers": 1}, RECURRENT),
    "jamba": (SMALL | {"num_experts": 2}, RECURRENT),
    "t5": ({"d_model": 32, "num_layers": 1}, "it is an encoder-decoder"),
    "llama": (
        SMALL | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "its rotary positions (dynamic) change with the length",
    ),
}


def on_no_device(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        if config.is_encoder_decoder:
            return AutoModelForSeq2SeqLM.from_config(config)
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_run_exactly_is_refused_by_name(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(PastaError) as error:
        TorchEngine(on_no_device(kind, settings))
    assert str(error.value) == f"the torch engine cannot run this {kind} model: {reason}"
    assert error.value.hint.startswith("use a decoder with rotary positions and full attention")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gpt_neox", "olmo2"])
def test_rotary_models_with_full_attention_are_taken(kind: str) -> None:
    assert TorchEngine(on_no_device(kind, SMALL | {"pad_token_id": 0})).vocabulary_size == 50


def test_a_mistral_without_its_window_is_taken() -> None:
    TorchEngine(on_no_device("mistral", SMALL | {"sliding_window": None}))
