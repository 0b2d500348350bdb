"""A decoder's layers by torch: the formula of the C++ code, and all there is without a compiler.

Shapes: Q tokens of the pass, N feeds, I width of the model, H heads, G kv heads, D head width,
P pairs of its numbers that rotate together, L layers, S slots of the cache, O linear outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pasta_decoding.engines.weights import Linear, ModelWeights


class Segment(NamedTuple):
    """Queries of one feed, which follow each other: `Segment` of decoder.h has the same fields.

    first_query: in the pass.
    slots:       that its last query sees; the last of them are those that the feed writes.
    list_start:  where these slots begin in the list of all segments.
    mask_start:  where its mask [queries, slots] begins.
    """

    first_query: int
    queries: int
    slots: int
    list_start: int
    mask_start: int


class AttentionMetadata(NamedTuple):
    """What the layers of one kind of attention must know of a pass.

    cos_QP, sin_QP: of each token's angles.
    segments_N5:    int64, a `Segment` for each feed.
    slots:          int32, the lists of all segments, one behind the other.
    masks:          bool, whether a query sees a slot, [queries, slots] for each segment.
    """

    cos_QP: Tensor
    sin_QP: Tensor
    segments_N5: Tensor
    slots: Tensor
    masks: Tensor


class TorchLayers:
    """Computes in float32, from weights with the adapter merged into them.

    slots_2LGSD: the cache, which keys and values are written into.
    """

    def __init__(self, weights: ModelWeights, slots_2LGSD: Tensor) -> None:
        self._weights = weights
        self._slots_2LGSD = slots_2LGSD
        self._layers = [
            (layer.norms, {name: merged_linear(parts) for name, parts in layer.linear.items()})
            for layer in weights.layers()
        ]
        gelu = partial(functional.gelu, approximate="tanh")
        self._activate = gelu if weights.is_gemma else functional.silu
        self._norm_I = weights.norm("model.norm")
        self.head = merged_linear([weights.linear("lm_head")])

    def __call__(self, hidden_QI: Tensor, kinds: Mapping[str, AttentionMetadata]) -> Tensor:
        """Return what the head takes. The metadata are by kinds of attention."""
        _, _, kv_heads, _, width = self._slots_2LGSD.shape
        head_counts = [self._weights.config.num_attention_heads, kv_heads, kv_heads]
        for number, (norms, linear) in enumerate(self._layers):
            metadata = kinds[self._weights.kinds[number]]
            input_QI = self._norm(hidden_QI, norms.get("input_norm"))
            heads_QHD = linear["qkv"](input_QI).view(len(input_QI), -1, width)
            query_QHD, key_QGD, value_QGD = torch.split(heads_QHD, head_counts, dim=1)
            query_QHD = self._norm(query_QHD, norms.get("query_norm")) * self._weights.scaling
            key_QGD = self._norm(key_QGD, norms.get("key_norm"))
            keys_GSD, values_GSD = self._slots_2LGSD[:, number]
            out_QHD = attend(query_QHD, key_QGD, value_QGD, keys_GSD, values_GSD, metadata)
            out_QI = linear["out"](out_QHD.flatten(1))
            hidden_QI = hidden_QI + self._norm(out_QI, norms.get("attention_norm"))
            input_QI = self._norm(hidden_QI, norms.get("mlp_input_norm"))
            gate_QM, up_QM = linear["gate_up"](input_QI).chunk(2, dim=-1)
            mlp_QI = linear["down"](self._activate(gate_QM) * up_QM)
            hidden_QI = hidden_QI + self._norm(mlp_QI, norms.get("mlp_norm"))
        return self._norm(hidden_QI, self._norm_I)

    def _norm(self, input_QI: Tensor, weight_I: Tensor | None) -> Tensor:
        if weight_I is None:
            return input_QI
        return functional.rms_norm(
            input_QI, weight_I.shape, weight_I, self._weights.config.rms_norm_eps
        )


def merged_linear(parts: Sequence[Linear]) -> Callable[[Tensor], Tensor]:
    """Return linear layers of the same inputs as one, with adapters merged into their weights.

    The outputs of the parts follow each other.
    """
    weights = []
    biases = []
    for part in parts:
        weight_OI = part.weight[:]
        if part.added is not None:
            down_RI, up_OR = part.added
            weight_OI += up_OR.float() @ down_RI.float()
        weights.append(weight_OI)
        biases.append(torch.zeros(len(weight_OI)) if part.bias_O is None else part.bias_O)
    return partial(functional.linear, weight=torch.cat(weights), bias=torch.cat(biases))


def rotated(heads_QHD: Tensor, cos_QP: Tensor, sin_QP: Tensor) -> Tensor:
    """Rotate the pairs of each head, which are its first and its second half."""
    x_QHP, y_QHP = heads_QHD.chunk(2, dim=-1)
    cos_Q1P = cos_QP[:, None]
    sin_Q1P = sin_QP[:, None]
    first_QHP = x_QHP * cos_Q1P - y_QHP * sin_Q1P
    second_QHP = y_QHP * cos_Q1P + x_QHP * sin_Q1P
    return torch.cat((first_QHP, second_QHP), dim=-1)


def attend(
    query_QHD: Tensor,
    key_QGD: Tensor,
    value_QGD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """Write keys and values into their slots; return attention's output, [Q, H, D]."""
    query_QHD = rotated(query_QHD, metadata.cos_QP, metadata.sin_QP)
    key_QGD = rotated(key_QGD, metadata.cos_QP, metadata.sin_QP)
    out_QHD = torch.empty_like(query_QHD)
    for segment in map(Segment._make, metadata.segments_N5.tolist()):
        queries = slice(segment.first_query, segment.first_query + segment.queries)
        seen_K = metadata.slots[segment.list_start : segment.list_start + segment.slots]
        mask_size = segment.queries * segment.slots
        mask = metadata.masks[segment.mask_start : segment.mask_start + mask_size]
        written = seen_K[-segment.queries :]
        keys_GSD[:, written] = key_QGD[queries].transpose(0, 1).to(keys_GSD.dtype)
        values_GSD[:, written] = value_QGD[queries].transpose(0, 1).to(values_GSD.dtype)
        out_1HQD = functional.scaled_dot_product_attention(
            query_QHD[queries].transpose(0, 1)[None],
            keys_GSD[None, :, seen_K].float(),
            values_GSD[None, :, seen_K].float(),
            attn_mask=mask.view(segment.queries, segment.slots),
            scale=1.0,
            enable_gqa=True,
        )
        out_QHD[queries] = out_1HQD[0].transpose(0, 1)
    return out_QHD
