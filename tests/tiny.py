"""Tiny random models of the shapes that Pasta runs: float32, seeded, made in milliseconds.

Two layers, width 32, four heads that share two kv heads. The weights are larger than usual, so
that a token seen or not, or seen at another position, moves the logits by far more than rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 100
OPERATORS = Path("~/.cache/pasta-decoding/operators").expanduser()
"""Where all runs of the tests keep those of the fast engine: building them takes half a minute."""
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


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    # Biases on queries, keys and values.
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # Queries and keys are normalised.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    # A layer with a window of four positions, then one with full attention.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
}


def tiny_model(kind: str, *, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any) -> Any:
    """Return a tiny model. `settings` go to its config."""
    config, model, own = KINDS[kind]
    with seeded(seed):
        return model(config(vocab_size=vocabulary, **SHAPE | own | settings)).eval()


TINY_MODELS: dict[str, Callable[..., Any]] = {kind: partial(tiny_model, kind) for kind in KINDS}
tiny_llama: Callable[..., LlamaForCausalLM] = TINY_MODELS["llama"]
tiny_qwen3: Callable[..., Qwen3ForCausalLM] = TINY_MODELS["qwen3"]
