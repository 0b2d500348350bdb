"""Attention over listed slots of a KV cache: a Triton kernel, and the formula that it computes.

Each query row has a list of slots, of any length and in any order. So a prompt's token and a
thread's next one are rows alike, and no mask exists. (PagedAttention, with pages of one token.)

Shapes: Q rows, H heads, G kv heads, S slots, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotRows:
    """What the rows of a pass write and see. All int32 but `written_Q`, which is int64.

    written_Q:   the slot that each row writes.
    positions_Q: of the rows; positions_S: of what the slots hold, these rows included. Sliding
                 windows need them.
    starts_Q, lengths_Q: each row's list is lists[start : start + length]; 0: it sees nothing, and
                 its output is 0.
    """

    written_Q: Tensor
    positions_Q: Tensor
    positions_S: Tensor
    starts_Q: Tensor
    lengths_Q: Tensor
    lists: Tensor


def attention_on(device: torch.device) -> Callable[..., Tensor]:
    """Return the kernel on a GPU, else `attend_plainly`, which has the same arguments."""
    if device.type != "cuda":
        return attend_plainly
    # torch brings Triton on some platforms only.
    from pasta_decoding.engines.triton_kernels import attend

    return attend


def attend_plainly(
    query_QHD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    rows: SlotRows,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return what each row attends to, [Q, H, D], computed row by row in float32."""
    queries, heads, _ = query_QHD.shape
    kv_heads, _, width = values_GSD.shape
    out_QHD = query_QHD.new_zeros(queries, heads, width)
    bounds: Any = zip(rows.starts_Q.tolist(), rows.lengths_Q.tolist(), strict=True)
    for row, (start, length) in enumerate(bounds):
        slots = rows.lists[start : start + length]
        if window is not None:
            slots = slots[rows.positions_Q[row] - rows.positions_S[slots] < window]
        if len(slots):
            query_GRD = query_QHD[row].float().view(kv_heads, heads // kv_heads, -1)
            score_GRK = query_GRD @ keys_GSD[:, slots].float().mT * scaling
            out_GRD = score_GRK.softmax(-1) @ values_GSD[:, slots].float()
            out_QHD[row] = out_GRD.reshape(heads, width).to(out_QHD.dtype)
    return out_QHD
