"""How a Hugging Face model computes over slots of one KV cache: official hooks, no patching.

Each token of a pass is a row with a list of the slots that it sees, of any length. So a prompt's
token and a thread's next one are rows alike, and requests need no padding. (PagedAttention, with
pages of one token.)

Shapes: B batch, Q rows, H heads, G kv heads, R heads that share one, D head width, S slots, K slots
from the first to the last that a request sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pasta_decoding.engines.support import refuse_large_cache
from pasta_decoding.errors import PastaError, errors_as

SLOTS = "pasta_slots"


@dataclass(frozen=True)
class SlotRows:
    """What the rows of a pass write and see. All int32 but `written_Q`, which is int64.

    written_Q:   the slot that each row writes.
    positions_Q: of the rows; positions_S: of what the slots hold, these rows included. Sliding
                 windows need them.
    starts_Q, lengths_Q: each row's list is lists[start : start + length]; it is not empty.
    """

    written_Q: Tensor
    positions_Q: Tensor
    positions_S: Tensor
    starts_Q: Tensor
    lengths_Q: Tensor
    lists: Tensor

    @cached_property
    def requests(self) -> list[tuple[slice, slice, Tensor]]:
        """For each request its rows, the slots from the first to the last that they see, seen_QK.

        Its rows write to slots that follow each other.
        """
        written_Q, starts_Q, lengths_Q, lists = (
            one.cpu().numpy() for one in (self.written_Q, self.starts_Q, self.lengths_Q, self.lists)
        )
        cuts, found = np.flatnonzero(np.diff(written_Q) != 1) + 1, []
        for own in np.split(np.arange(len(written_Q)), cuts):
            seen = [lists[starts_Q[row] :][: lengths_Q[row]] for row in own]
            every = np.concatenate(seen)
            lowest, end = int(every.min()), int(every.max()) + 1
            seen_QK = np.zeros((len(own), end - lowest), dtype=np.bool_)
            for seen_K, slots in zip(seen_QK, seen, strict=True):
                seen_K[slots - lowest] = True
            mask_QK = torch.from_numpy(seen_QK).to(self.lists.device)
            found.append((slice(own[0], own[-1] + 1), slice(lowest, end), mask_QK))
        return found


class SlotCache(Cache):
    """Keys and values of all requests, [1, G, S, D] in each layer, in memory taken once.

    rows:  what the next pass writes and sees; the model's caller sets it.
    spare: the last slot, which takes what padding writes.
    """

    rows: SlotRows

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        learnt, slots = DynamicCache(), tokens + 1
        one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            model(input_ids=one, past_key_values=learnt)  # tells what a slot holds
        super().__init__(layers=learnt.layers)
        self.spare = tokens
        pairs = [(key_1G1D, value_1G1D) for key_1G1D, value_1G1D, *_ in learnt]
        if model.device.type == "cpu":  # others say themselves what does not fit
            token_bytes = sum(one.numel() * one.element_size() for pair in pairs for one in pair)
            refuse_large_cache(tokens, token_bytes)

        def room(one_1G1D: Tensor) -> Tensor:
            return one_1G1D.new_zeros(1, one_1G1D.shape[1], slots, one_1G1D.shape[3])

        with errors_as(f"no memory on {model.device} for {tokens} tokens", RuntimeError):
            self.held = [(room(key_1G1D), room(value_1G1D)) for key_1G1D, value_1G1D in pairs]
        self.positions_S = torch.zeros(slots, dtype=torch.int32, device=model.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values into their slots; return all slots."""
        for held, states in zip(self.held[layer_idx], (key_states, value_states), strict=True):
            held.index_copy_(2, self.rows.written_Q, states)
        return self.held[layer_idx]

    def copy(self, source: slice, target: slice) -> None:
        """Copy slots to others."""
        self.positions_S[target] = self.positions_S[source]
        for pair in self.held:
            for held in pair:
                held[:, :, target] = held[:, :, source]


@cache
def has_kernel(device: torch.device) -> bool:
    """Say whether the Triton kernel runs there; torch brings Triton on some platforms only."""
    return device.type == "cuda" and find_spec("triton") is not None


def slot_attention(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rows: SlotRows | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend row by row, each to the slots that it sees; a plain call of the model has no rows.

    Scores that are capped or share their softmax with sinks are refused.
    """
    if softcap is not None or s_aux is not None:
        raise PastaError("Pasta computes no attention that caps its scores or has sinks")
    if rows is None:
        return sdpa_attention_forward(
            module, query_BHQD, key_BGKD, value_BGKD, attention_mask, scaling=scaling, **others
        )
    attend = attend_plainly
    if has_kernel(query_BHQD.device):
        from pasta_decoding.engines.triton_kernels import attend
    scaling = scaling or query_BHQD.shape[-1] ** -0.5
    query_QHD = query_BHQD[0].transpose(0, 1)
    out_QHD = attend(query_QHD, key_BGKD[0], value_BGKD[0], rows, scaling, sliding_window)
    return out_QHD[None], None


def attend_plainly(
    query_QHD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    rows: SlotRows,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return what each row attends to, [Q, H, D]: what the kernel computes."""
    kv_heads, _, width = values_GSD.shape
    heads_QGRD = query_QHD.unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
    out_QGRD = query_QHD.new_empty(*heads_QGRD.shape[:3], width)
    for own, slots, seen_QK in rows.requests:
        if window is not None:
            near_QK = rows.positions_Q[own, None] - rows.positions_S[slots] < window
            seen_QK = seen_QK & near_QK  # noqa: PLW2901
        own_QGRD = heads_QGRD[own]
        queries, _, shared, _ = own_QGRD.shape
        # Heads that share a kv head are queries of one matrix, so no key is copied.
        out_GND = scaled_dot_product_attention(
            own_QGRD.permute(1, 2, 0, 3).flatten(1, 2)[None],
            keys_GSD[None, :, slots],
            values_GSD[None, :, slots],
            attn_mask=seen_QK.repeat(shared, 1),
            scale=scaling,
        )[0]
        out_QGRD[own] = out_GND.view(kv_heads, shared, queries, width).permute(2, 0, 1, 3)
    return out_QGRD.flatten(1, 2)


AttentionInterface.register(SLOTS, slot_attention)
# 4-D masks pass as they are; this one serves plain calls of the same model with a 2-D mask.
AttentionMaskInterface.register(SLOTS, sdpa_mask)
