"""Tiny random models of the shapes that Pasta runs: float32, seeded, made in milliseconds.

Two layers, width 32, four heads that share two kv heads. The weights are larger than usual, so
that a token seen or not, or seen at another position, moves the logits by far more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 100
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave everyone else's random numbers alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def tiny_llama(*, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Return a tiny Llama. `settings` go to its config."""
    with seeded(seed):
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SHAPE | settings)).eval()


def tiny_qwen2(*, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any) -> Qwen2ForCausalLM:
    """Return a tiny Qwen 2: as Llama, with biases on queries, keys and values."""
    with seeded(seed):
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **SHAPE | settings)).eval()


def tiny_qwen3(*, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any) -> Qwen3ForCausalLM:
    """Return a tiny Qwen 3: as Llama, with queries and keys normalised."""
    with seeded(seed):
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SHAPE | settings)).eval()


def tiny_gemma3(
    *, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any
) -> Gemma3ForCausalLM:
    """Return a tiny Gemma 3: a layer with a window of four positions, then one with full attention.

    The two kinds also rotate differently.
    """
    windows = {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }
    with seeded(seed):
        config = Gemma3TextConfig(vocab_size=vocabulary, **SHAPE | windows | settings)
        return Gemma3ForCausalLM(config).eval()


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
}
