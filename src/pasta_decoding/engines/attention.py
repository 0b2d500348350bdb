"""How a Hugging Face model is given a preallocated KV cache: official hooks, no patching.

`SlotLayer` is a cache layer that writes into memory taken once; `slot_attention` is an
attention function for it, registered by name, that never copies a grouped key. A `Plan` tells both
which slots a forward pass writes and reads: by segments, or by rows.

Shapes: B batch, H heads, G kv heads, Q query tokens, K key tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import sdpa_mask

from pasta_decoding.engines.support import refuse_large_cache
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.engines.paged_attention import SlotRows

SLOTS = "pasta_slots"


class QuerySegment(NamedTuple):
    """Queries of a forward pass that look at the same slots.

    queries: which of the Q tokens; they write to the slots `written`, in their order.
    seen:    the slots that they look at, their own included;
    masks:   which of them each query sees, by the layer's window (None: full attention): added to
             the scores, [1, 1, heads that share a kv head x queries, slots]. None where queries
             see the slots up to their own: a single one sees all, several are all there is.
    """

    queries: slice
    written: slice
    seen: slice
    masks: Mapping[int | None, Tensor | None]


@dataclass(slots=True)
class Plan:
    """The slots that a forward pass writes and reads. The model's caller sets it first.

    rows: take the place of segments where they are given.
    """

    segments: Sequence[QuerySegment] = field(default_factory=tuple)
    rows: SlotRows | None = None


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values of all requests, in memory taken once.

    held: keys_1GSD and values_1GSD of all slots.
    """

    is_sliding = False

    def __init__(self, plan: Plan, key_1G1D: Tensor, value_1G1D: Tensor, slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan, self._slots = plan, slots
        self.held = self.keys, self.values = _room(key_1G1D, slots), _room(value_1G1D, slots)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory was taken before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values where its plan says; return all slots."""
        keys, values = self.held
        if (rows := self._plan.rows) is not None:
            keys.index_copy_(2, rows.written_Q, key_states)
            values.index_copy_(2, rows.written_Q, value_states)
            return keys, values
        for segment in self._plan.segments:
            keys[:, :, segment.written] = key_states[:, :, segment.queries]
            values[:, :, segment.written] = value_states[:, :, segment.queries]
        return keys, values

    def copy(self, source: slice, target: slice) -> None:
        """Copy slots to others."""
        for held in self.held:
            held[:, :, target] = held[:, :, source]

    def get_seq_length(self) -> int:
        """No one length holds for all requests; position ids are always given."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self._slots, 0

    def get_max_length(self) -> int:
        return self._slots


def slot_cache(model: PreTrainedModel, slots: int) -> tuple[Cache, Plan]:
    """Return a cache of this many slots in each layer, one to spare, and what steers it.

    A pass over one token tells what the slots hold.
    """
    learnt = DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=one, past_key_values=learnt)
    examples = [(key_1G1D, value_1G1D) for key_1G1D, value_1G1D, *_ in learnt]
    if model.device.type == "cpu":  # others say themselves what does not fit
        token_bytes = sum(one.numel() * one.element_size() for pair in examples for one in pair)
        refuse_large_cache(slots - 1, token_bytes)
    plan = Plan()
    return Cache(layers=[SlotLayer(plan, *pair, slots) for pair in examples]), plan


def _room(one_1G1D: Tensor, slots: int) -> Tensor:
    _, kv_heads, _, width = one_1G1D.shape
    try:
        return one_1G1D.new_empty(1, kv_heads, slots, width)
    except RuntimeError as error:
        raise PastaError(f"no memory on {one_1G1D.device} for a cache of {slots} tokens") from error


def slot_attention(
    _module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend segment by segment, or row by row, each to the slots that it sees.

    Without a plan it serves a plain call of the same model. Scores that are capped or share their
    softmax with sinks are refused.
    """
    if softcap is not None or s_aux is not None:
        raise PastaError(
            "this model's attention caps its scores or has sinks, which Pasta does not compute"
        )
    if plan is None:
        out = _attend(query_BHQD, key_BGKD, value_BGKD, attention_mask, scaling, dropout)
        return out.transpose(1, 2).contiguous(), None
    if plan.rows is not None:
        from pasta_decoding.engines.paged_attention import attention_on

        query_QHD, scaling = query_BHQD[0].transpose(0, 1), scaling or query_BHQD.shape[-1] ** -0.5
        out_QHD = attention_on(query_QHD.device)(
            query_QHD, key_BGKD[0], value_BGKD[0], plan.rows, scaling, sliding_window
        )
        return out_QHD[None], None
    parts = [
        _attend(
            query_BHQD[:, :, one.queries],
            key_BGKD[:, :, one.seen],
            value_BGKD[:, :, one.seen],
            one.masks[sliding_window],
            scaling,
        )
        for one in plan.segments
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention where the heads that share a kv head are rows of one query matrix.

    Repeating the keys for them, as is usual, copies the whole cache in each layer; this copies the
    few rows of the query. `mask` has a row a query, or one a row of that matrix; None is causal.
    """
    batch, heads, queries, _ = query_BHQD.shape
    kv_heads = key_BGKD.shape[1]
    causal = mask is None and queries > 1
    rows = 1 if causal else heads // kv_heads
    if mask is not None and mask.shape[2] == queries > 1:
        mask = mask.repeat(1, 1, rows, 1)
    out = scaled_dot_product_attention(
        query_BHQD.reshape(batch, heads // rows, rows * queries, -1),
        key_BGKD,
        value_BGKD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        # The causal kernel, which takes no mask, finds the shared keys by itself.
        enable_gqa=causal and heads > kv_heads,
    )
    return out.reshape(batch, heads, queries, -1)


AttentionInterface.register(SLOTS, slot_attention)
# 4-D masks pass as they are; this one serves plain calls of the same model with a 2-D mask.
AttentionMaskInterface.register(SLOTS, sdpa_mask)
