"""A small decoder of our own: Llama, SmolLM, Mistral, Qwen 2, Qwen 3 and Gemma 3.

It computes over weights of 32, 16, 8 or 4 bits, and an adapter beside them, in float32. With the
C++ code a row's result does not depend, to the bit, on the other rows of its step, nor on where its
prompt was cut. Every other model goes to the torch engine, which is the reference.

Shapes: Q tokens of the pass, F of them with logits, K slots that a feed sees, I width of the model,
P pairs of a head's numbers that rotate together, N feeds, V vocabulary, L layers, G kv heads,
S slots of the cache, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import Batch, CachedEngine, IntArray
from pasta_decoding.engines.layers import AttentionMetadata, Segment, TorchLayers
from pasta_decoding.engines.native import NativeLayers, load_operators
from pasta_decoding.engines.support import attention_windows, refuse_large_cache, rope_types
from pasta_decoding.engines.weights import ModelWeights
from pasta_decoding.errors import PastaError, errors_as

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ROPES = {"default", "linear", "llama3", "yarn"}


def obstacle(config: Any) -> str | None:
    """Return why the fast engine does not run a model, given its text config; None if it does."""
    if config.model_type not in FAMILIES:
        return f"it is of the family {config.model_type}"
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads or head_width % 2:
        return f"its {heads} heads share {kv_heads} unevenly, or are of an odd width"
    if unknown_ropes := rope_types(config.rope_parameters) - ROPES:
        return f"its rotary positions are {', '.join(sorted(unknown_ropes))}"
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != ("gelu_pytorch_tanh" if config.model_type == "gemma3_text" else "silu"):
        return f"its activation is {activation}"
    refused = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    if any(getattr(config, name, None) for name in refused):
        return "it caps its scores or attends in both directions"
    return None


def attention_segments(batch: Batch, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return segments_N5, slots and masks of `AttentionMetadata` for layers with this window."""
    segments: list[Segment] = []
    lists: list[IntArray] = []
    masks: list[npt.NDArray[np.bool_]] = []
    first_query = list_start = mask_start = 0
    for item in batch.items:
        for feed, seen_K in zip(item.feeds, item.seen, strict=True):
            queries = len(feed.ids)
            slots = len(seen_K)
            mask_QK = np.tri(queries, slots, slots - queries, dtype=np.bool_)
            if window is not None:
                positions_K = item.positions_K[seen_K - item.start]
                mask_QK &= np.subtract.outer(feed.positions, positions_K) < window
            segments.append(Segment(first_query, queries, slots, list_start, mask_start))
            lists.append(seen_K)
            masks.append(mask_QK.ravel())
            first_query += queries
            list_start += slots
            mask_start += mask_QK.size
    return (
        torch.tensor(segments),
        torch.from_numpy(np.concatenate(lists)),
        torch.from_numpy(np.concatenate(masks)),
    )


def frequencies(weights: ModelWeights, kind: str) -> tuple[Tensor, float]:
    """Return the angle of one position for each pair of a head's numbers, and a scale.

    The cosine and the sine of the angles are multiplied by the scale. `kind` is that of a layer's
    attention.
    """
    config = weights.config
    factors_P = weights.frequency_factors
    rope_of_kind = config.rope_parameters.get(kind)
    rope = rope_of_kind or config.rope_parameters
    if factors_P is None and rope.get("rope_type", "default") != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        init = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        return init(config, layer_type=kind if rope_of_kind else None)
    pair_P = torch.arange(0, weights.head_width, 2, dtype=torch.float32) / weights.head_width
    frequency_P = rope["rope_theta"] ** -pair_P
    if factors_P is None:
        factors_P = torch.ones_like(frequency_P)
    if factors_P.shape != frequency_P.shape or not (factors_P > 0).all():
        raise PastaError("rope_freqs.weight has no divisor above 0 for each frequency")
    return frequency_P / factors_P, 1.0


class FastEngine(CachedEngine):
    """Implements `Engine` on the weights of a model of a family that it knows, on a processor.

    cache_tokens: tokens that the cache holds, those of all requests together.
    cache_dtype:  of keys and values, float32 or bfloat16.
    operators:    folder that keeps the C++ code once it is built; None: compute by torch.
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
        kv_heads = config.num_key_value_heads
        layers = config.num_hidden_layers
        shape = (2, layers, kv_heads, cache_tokens, weights.head_width)
        token_bytes = math.prod(shape) // cache_tokens * cache_dtype.itemsize
        refuse_large_cache(cache_tokens, token_bytes)
        self._weights = weights
        self._slots_2LGSD = torch.zeros(shape, dtype=cache_dtype)
        self._windows = attention_windows(config)
        self._frequencies = {kind: frequencies(weights, kind) for kind in self._windows}
        native = None if operators is None else load_operators(operators)
        self._layers: TorchLayers | NativeLayers
        if native is None:
            self._layers = TorchLayers(weights, self._slots_2LGSD)
            self.name = "fast float32"
        else:
            with errors_as("there is no room for the model's weights", MemoryError):
                self._layers = NativeLayers(native, weights, self._slots_2LGSD)
            self.name = f"fast {weights.form}"

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        source_slots, target_slots = self.mark_copied(source, target, tokens)
        self._slots_2LGSD[..., target_slots, :] = self._slots_2LGSD[..., source_slots, :]

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
            kinds[kind] = AttentionMetadata(
                (angle_QP.cos() * scale).float(),
                (angle_QP.sin() * scale).float(),
                *attention_segments(batch, self._windows[kind]),
            )
        hidden_QI = self._layers(self._weights.embed(batch.ids), kinds)
        hidden_FI = hidden_QI[torch.tensor(batch.logits_tokens, dtype=torch.long)]
        logits_FV: FloatArray = self._layers.head(hidden_FI).numpy()
        return logits_FV if batch.order is None else logits_FV[batch.order]
