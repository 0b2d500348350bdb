"""A small decoder of our own: Llama, SmolLM, Mistral, Qwen 2, Qwen 3 and Gemma 3.

It computes over weights of 32, 16, 8 or 4 bits, and an adapter beside them, in float32. With the
C++ code a row's result does not depend, to the bit, on the other rows of its step, nor on where its
prompt was cut. Every other model goes to the torch engine, which is the reference.

Shapes: Q tokens of the pass, F of them with logits, I width of the model, P pairs of a
head's numbers that rotate together, N feeds, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import Batch, CachedEngine
from pasta_decoding.engines.layers import AttentionMetadata, TorchLayers
from pasta_decoding.engines.native import NativeLayers, library
from pasta_decoding.engines.support import attention_windows, refuse_large_cache, rope_types
from pasta_decoding.engines.weights import ModelWeights
from pasta_decoding.errors import PastaError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ROPES = {"default", "linear", "llama3", "yarn"}


def obstacle(config: Any) -> str | None:
    """Return why the fast engine does not run a model, given its text config; None if it does."""
    if config.model_type not in FAMILIES:
        return f"it is of the family {config.model_type}"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads or (getattr(config, "head_dim", None) or config.hidden_size // heads) % 2:
        return f"its {heads} heads share {kv_heads} unevenly, or are of an odd width"
    if other := rope_types(config.rope_parameters) - ROPES:
        return f"its rotary positions are {', '.join(sorted(other))}"
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != ("gelu_pytorch_tanh" if config.model_type == "gemma3_text" else "silu"):
        return f"its activation is {activation}"
    capped = any(getattr(config, f"{one}_logit_softcapping", None) for one in ("attn", "final"))
    if capped or getattr(config, "use_bidirectional_attention", None):
        return "it caps its scores or attends in both directions"
    return None


def slot_table(batch: Batch, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return table_N5, slots and masks of `AttentionMetadata` for layers with this window."""
    table, lists, masks = [], [], []
    first = listed = masked = 0
    for item in batch.items:
        for feed, seen_K in zip(item.feeds, item.seen, strict=True):
            queries, slots = len(feed.ids), len(seen_K)
            mask_QK = np.tri(queries, slots, slots - queries, dtype=np.bool_)
            if window is not None:
                positions_K = item.positions_K[seen_K - item.start]
                mask_QK &= np.subtract.outer(feed.positions, positions_K) < window
            table.append((first, queries, slots, listed, masked))
            lists.append(seen_K)
            masks.append(mask_QK.ravel())
            first, listed, masked = first + queries, listed + slots, masked + mask_QK.size
    seen, mask = torch.from_numpy(np.concatenate(lists)), torch.from_numpy(np.concatenate(masks))
    return torch.tensor(table), seen, mask


def frequencies(weights: ModelWeights, kind: str) -> tuple[Tensor, float]:
    """Return the angle of one position for each pair of a head's numbers, and a scale."""
    config, factors = weights.config, weights.frequency_factors
    nested = config.rope_parameters.get(kind)
    rope = nested or config.rope_parameters
    if factors is None and rope.get("rope_type", "default") != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind if nested else None)
    pair_P = torch.arange(0, weights.head_width, 2, dtype=torch.float32) / weights.head_width
    frequency_P = rope["rope_theta"] ** -pair_P
    divisor_P = torch.ones_like(frequency_P) if factors is None else factors
    if divisor_P.shape != frequency_P.shape or not (divisor_P > 0).all():
        raise PastaError("rope_freqs.weight has no divisor above 0 for each frequency")
    return frequency_P / divisor_P, 1.0


class FastEngine(CachedEngine):
    """Implements `Engine` on the weights of a model of a family that it knows, on a processor.

    cache_dtype: of keys and values, float32 or bfloat16.
    operators:   folder that keeps the C++ code once it is built; None: compute by torch.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        cache_dtype: torch.dtype = torch.float32,
        operators: Path | None = None,
    ) -> None:
        assert cache_dtype in (torch.float32, torch.bfloat16), "the C++ code knows no other"
        config = weights.config
        if reason := obstacle(config):
            raise PastaError(f"the fast engine cannot run this {config.model_type} model: {reason}")
        super().__init__(
            Limits(int(config.vocab_size), int(config.max_position_embeddings), cache_tokens)
        )
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        shape = (2, layers, heads, cache_tokens, weights.head_width)
        refuse_large_cache(cache_tokens, math.prod(shape) // cache_tokens * cache_dtype.itemsize)
        self._weights, self._slots = weights, torch.zeros(shape, dtype=cache_dtype)
        self._windows = attention_windows(config)
        self._frequencies = {kind: frequencies(weights, kind) for kind in self._windows}
        built = None if operators is None else library(operators)
        self._layers = (
            TorchLayers(weights, self._slots)
            if built is None
            else NativeLayers(built, weights, self._slots)
        )
        self.name = f"fast {'float32' if built is None else weights.form}"

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        given, taken = self.copied(source, target, tokens)
        self._slots[..., taken, :] = self._slots[..., given, :]

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        batch = self.plan(feeds)
        if not batch.items:
            return np.empty((0, self.vocabulary_size), dtype=np.float32)
        positions_Q1 = torch.tensor(batch.positions, dtype=torch.float32)[:, None]
        kinds = {}
        for kind, (frequency_P, scale) in self._frequencies.items():
            # By float64, so that no split of the work shows in cosine and sine.
            angle_QP = (positions_Q1 * frequency_P).double()
            cos_QP, sin_QP = ((one * scale).float() for one in (angle_QP.cos(), angle_QP.sin()))
            kinds[kind] = AttentionMetadata(cos_QP, sin_QP, *slot_table(batch, self._windows[kind]))
        hidden_QI = self._layers(self._weights.embed(batch.ids), kinds)
        hidden_FI = hidden_QI[torch.tensor(batch.wanted, dtype=torch.long)]
        logits_FV: FloatArray = self._layers.head(hidden_FI).numpy()
        return logits_FV if batch.order is None else logits_FV[batch.order]
