"""How a Hugging Face model is given a preallocated pool of keys: official hooks, no patching.

`PooledLayer` is a cache layer that writes into memory taken once; `grouped_attention` is an
attention function for it, registered by name, that never copies a grouped key.

Shapes: B batch, H heads, G kv heads, Q query tokens, K key tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import sdpa_mask

from pasta_decoding.errors import PastaError

GROUPED = "pasta_grouped"


@dataclass(slots=True)
class Span:
    """The cells that the running forward writes: first.. up to, not including, end."""

    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class KeyShape:
    """One token's key and value in one layer, an example of what its cells hold."""

    key_G1D: Tensor
    value_G1D: Tensor


class PooledLayer(CacheLayerMixin):
    """One layer's keys and values of one request, in memory taken once.

    `span` is shared by a request's layers; who calls the model sets it before.
    """

    is_sliding = False

    def __init__(self, span: Span, shape: KeyShape, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._span, self._capacity = span, capacity
        self.keys = _cells(shape.key_G1D, capacity)
        self.values = _cells(shape.value_G1D, capacity)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory was taken before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values; return views of all cells in use."""
        assert self.keys is not None, "taken at the beginning"
        assert self.values is not None, "taken at the beginning"
        first, end = self._span.first, self._span.end
        self.keys[:, :, first:end] = key_states
        self.values[:, :, first:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Cells in use before the running forward."""
        return self._span.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys `update` will return, and the first one's index."""
        return self._span.first + query_length, 0

    def get_max_length(self) -> int:
        """Cells altogether."""
        return self._capacity


def learn_shapes(model: PreTrainedModel) -> list[KeyShape]:
    """Return what each layer's keys look like: only the model itself tells that for sure."""
    cache = DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=one, past_key_values=cache)
    return [KeyShape(keys_1G1D[0], values_1G1D[0]) for keys_1G1D, values_1G1D, *_ in cache]


def pooled_cache(shapes: Sequence[KeyShape], capacity: int) -> tuple[Cache, Span]:
    """Return a cache of `capacity` cells in each layer, and what steers it."""
    span = Span()
    return Cache(layers=[PooledLayer(span, shape, capacity) for shape in shapes]), span


def _cells(one_G1D: Tensor, capacity: int) -> Tensor:
    kv_heads, _, width = one_G1D.shape
    try:
        return one_G1D.new_zeros(1, kv_heads, capacity, width)
    except RuntimeError as error:
        raise PastaError(
            f"no memory on {one_G1D.device} for a cache of {capacity} tokens",
            hint="allow fewer tokens for the answer, or run fewer requests at a time",
        ) from error


def grouped_attention(
    _module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Compute attention where the heads that share a kv head are rows of one query matrix.

    Repeating the keys for them, as is usual, copies the whole cache in each layer; this copies the
    few rows of the query. `attention_mask` is [B, 1, Q, K], added or boolean. None means that
    queries see the keys up to their own: a single one sees all, several are as many as the keys.
    """
    batch, heads, queries, _ = query_BHQD.shape
    kv_heads = key_BGKD.shape[1]
    causal = attention_mask is None and queries > 1
    rows = 1 if causal else heads // kv_heads
    if attention_mask is not None and queries > 1 and rows > 1:
        attention_mask = attention_mask.repeat(1, 1, rows, 1)
    out = scaled_dot_product_attention(
        query_BHQD.reshape(batch, heads // rows, rows * queries, -1),
        key_BGKD,
        value_BGKD,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        # The causal kernel, which takes no mask, finds the shared keys by itself.
        enable_gqa=causal and heads > kv_heads,
    )
    return out.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
# 4-D masks pass as they are; this one serves whoever calls the same model with a plain 2-D mask.
AttentionMaskInterface.register(GROUPED, sdpa_mask)
