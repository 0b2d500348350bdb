"""How a Hugging Face model computes over slots of one KV cache: official hooks, no patching.

On a GPU a Triton kernel attends; elsewhere `attend_plainly`, which is its formula.

Shapes: B batch, Q rows, H heads, G kv heads, R heads that share one, N queries of such heads,
D head width, S slots, K slots from the first to the last that a request sees.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pasta_decoding.engines.slot_rows import SlotRows
from pasta_decoding.engines.support import refuse_large_cache
from pasta_decoding.errors import PastaError, errors_as

SLOTS = "pasta_slots"


class SlotCache(Cache):
    """Keys and values of all requests, [1, G, S, D] in each layer, in memory taken once.

    rows:            those of the next pass; the model's caller sets them.
    spare:           the last slot, which takes what padding writes.
    slots_of_layers: for each layer keys_1GSD and values_1GSD.
    """

    rows: SlotRows

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        """Raise PastaError if there is no memory for this number of tokens."""
        example = _one_token_cache(model)
        super().__init__(layers=example.layers)
        self.spare = tokens
        pairs = [(key_1G1D, value_1G1D) for key_1G1D, value_1G1D, *_ in example]
        if model.device.type == "cpu":  # a GPU says itself what does not fit
            token_bytes = sum(states.numel() * states.element_size() for states in chain(*pairs))
            refuse_large_cache(tokens, token_bytes)
        slots = tokens + 1
        with errors_as(f"no memory on {model.device} for {tokens} tokens", RuntimeError):
            self.slots_of_layers = [
                (_empty_slots(key_1G1D, slots), _empty_slots(value_1G1D, slots))
                for key_1G1D, value_1G1D in pairs
            ]
        self.positions_S = torch.zeros(slots, dtype=torch.int32, device=model.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values into their slots; return all slots."""
        keys_1GSD, values_1GSD = self.slots_of_layers[layer_idx]
        keys_1GSD.index_copy_(2, self.rows.written_Q, key_states)
        values_1GSD.index_copy_(2, self.rows.written_Q, value_states)
        return keys_1GSD, values_1GSD

    def copy(self, source: slice, target: slice) -> None:
        """Copy slots to others."""
        self.positions_S[target] = self.positions_S[source]
        for slots_1GSD in chain(*self.slots_of_layers):
            slots_1GSD[:, :, target] = slots_1GSD[:, :, source]


def _one_token_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the model's own cache of one token, which shows what a slot of each layer holds."""
    one_token_cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, past_key_values=one_token_cache)
    return one_token_cache


def _empty_slots(states_1G1D: Tensor, slots: int) -> Tensor:
    """Return zeros for as many tokens of the kind."""
    _, kv_heads, _, width = states_1G1D.shape
    return states_1G1D.new_zeros(1, kv_heads, slots, width)


@cache
def has_kernel(device: torch.device) -> bool:
    """Can the Triton kernel run on the device? torch brings Triton on some platforms only."""
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend row by row, each to the slots that it sees: an attention function of transformers.

    A plain call of the model has no rows, and goes to transformers' own function. Raises PastaError
    for scores that are capped or share their softmax with sinks.
    """
    if softcap is not None or s_aux is not None:
        raise PastaError("Pasta computes no attention that caps its scores or has sinks")
    if rows is None:
        return sdpa_attention_forward(
            module, query_BHQD, key_BGKD, value_BGKD, attention_mask, scaling=scaling, **options
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
    """Return the attention output of each row, [Q, H, D], as the kernel does.

    window: a row sees slots whose positions are less than this far behind; None: all in its list.
    """
    kv_heads, _, width = values_GSD.shape
    query_QGRD = query_QHD.unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
    sharing = query_QGRD.shape[2]
    out_QGRD = query_QHD.new_empty(*query_QGRD.shape[:3], width)
    for request_rows, slots, seen_QK in rows.requests:
        mask_QK = seen_QK
        if window is not None:
            positions_Q = rows.positions_Q[request_rows]
            distance_QK = positions_Q[:, None] - rows.positions_S[slots]
            mask_QK = seen_QK & (distance_QK < window)
        request_QGRD = query_QGRD[request_rows]
        # Heads that share a kv head are queries of one matrix, so no key is copied.
        query_GND = request_QGRD.permute(1, 2, 0, 3).flatten(1, 2)
        out_GND = scaled_dot_product_attention(
            query_GND[None],
            keys_GSD[None, :, slots],
            values_GSD[None, :, slots],
            attn_mask=mask_QK.repeat(sharing, 1),
            scale=scaling,
        )[0]
        out_GRQD = out_GND.view(kv_heads, sharing, -1, width)
        out_QGRD[request_rows] = out_GRQD.permute(2, 0, 1, 3)
    return out_QGRD.flatten(1, 2)


AttentionInterface.register(SLOTS, slot_attention)
# `sdpa_mask` serves calls of the same model with a 2-D mask; transformers leaves 4-D masks alone.
AttentionMaskInterface.register(SLOTS, sdpa_mask)
