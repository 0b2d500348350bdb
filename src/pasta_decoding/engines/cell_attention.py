"""The attention of a compiled pass: one operator a layer, in C++, which alone sees the cells.

It writes the pass's keys and values into the cache and attends for all requests in one call
(attention.cpp). What the pass writes and sees is told before it begins, as a `Seen`.

Shapes: Q tokens of the pass, S segments (the tokens of one request), W windows of the model's
layers, H heads, G kv heads, C cells of the cache, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pasta_decoding.engines.attention import SlotLayer
from pasta_decoding.engines.kv_cache import BatchItem, BoolArray, is_causal
from pasta_decoding.engines.operators import LIBRARY

TRACED = "pasta_traced"
"""The attention function under which a model is traced: it calls the operator."""

_NOTHING = torch.empty(0, 0, 6, dtype=torch.long)

LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int? window)"
    " -> Tensor"
)


def _shape_only(query_1HQD: Tensor, _key: Tensor, value_1GQD: Tensor, *_rest: Any) -> Tensor:
    heads, queries = query_1HQD.shape[1:3]
    return query_1HQD.new_empty(1, queries, heads, value_1GQD.shape[-1])


LIBRARY.impl("attend", _shape_only, "Meta")


def _traced_attention(
    module: nn.Module,
    query_1HQD: Tensor,
    key_1GQD: Tensor,
    value_1GQD: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scaling = query_1HQD.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    operator: Any = torch.ops.pasta.attend
    return operator(query_1HQD, key_1GQD, value_1GQD, layer, scaling, sliding_window), None


AttentionInterface.register(TRACED, _traced_attention)
AttentionMaskInterface.register(TRACED, sdpa_mask)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass writes and sees, as the operator reads it.

    windows:   those of the model's layers, -1 for none.
    table_WS6: of each segment its first query, how many they are, the cell that the first is
               written to, the first cell seen, the last one + 1, and where its mask begins in
    masks:     bytes, 1 for a cell that a query sees, [queries, cells] a segment; -1: it has none,
               its queries see all cells up to their own.
    """

    windows: list[int]
    table_WS6: Tensor
    masks: Tensor

    @classmethod
    def of(cls, items: Sequence[BatchItem], windows: Sequence[int | None]) -> Seen:
        """Lay out what each request's part of a step sees."""
        table: list[list[list[int]]] = []
        masks: list[BoolArray] = []
        end_of_masks = 0
        for window in windows:
            table.append([])
            first = 0
            for item in items:
                mask_QK = item.visible(window)
                queries = len(item.ids)
                segment = [first, queries, item.written.start, item.start, item.end, -1]
                if not is_causal(mask_QK):
                    segment[-1] = end_of_masks
                    masks.append(mask_QK.ravel())
                    end_of_masks += mask_QK.size
                table[-1].append(segment)
                first += queries
        flat = np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)
        named = [-1 if window is None else window for window in windows]
        return cls(named, torch.tensor(table), torch.from_numpy(flat.view(np.uint8)))


@contextmanager
def looking_at(layers: Sequence[SlotLayer], seen: Seen) -> Iterator[None]:
    """Let the operator work on these layers' cells, in this thread, for the length of a pass."""
    keys_1GCD, values_1GCD = zip(*(layer.held() for layer in layers), strict=True)
    see: Any = torch.ops.pasta.see
    see(keys_1GCD, values_1GCD, seen.table_WS6, seen.masks, seen.windows)
    try:
        yield
    finally:
        see([], [], _NOTHING, _NOTHING, [])
