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


class AttentionMetadata(NamedTuple):
    """What the layers of one kind of attention must know of a pass.

    cos_QP, sin_QP: of each token's angles.
    table_N5: for each feed a `Segment` of decoder.h.
    slots:    that its last query sees, one list behind the other.
    masks:    whether a query sees a slot, [queries, slots] for each feed.
    """

    cos_QP: Tensor
    sin_QP: Tensor
    table_N5: Tensor
    slots: Tensor
    masks: Tensor


class TorchLayers:
    """Computes in float32, from weights with the adapter merged into them.

    slots_2LGSD: the cache, which keys and values are written into.
    """

    def __init__(self, weights: ModelWeights, slots_2LGSD: Tensor) -> None:
        self._weights, self._slots_2LGSD = weights, slots_2LGSD
        self._layers = [
            (layer.norms, {name: dense(parts) for name, parts in layer.linear.items()})
            for layer in weights.layers()
        ]
        gelu = partial(functional.gelu, approximate="tanh")
        self._activated = gelu if weights.is_gemma else functional.silu
        self._norm_I = weights.norm("model.norm")
        self.head = dense([weights.linear("lm_head")])

    def __call__(self, hidden_QI: Tensor, kinds: Mapping[str, AttentionMetadata]) -> Tensor:
        """Return what the head takes. The metadata are by kinds of attention."""
        _, _, kv_heads, _, width = self._slots_2LGSD.shape
        split = [self._weights.config.num_attention_heads, kv_heads, kv_heads]
        for number, (norms, linear) in enumerate(self._layers):
            metadata = kinds[self._weights.kinds[number]]
            input_QI = self._norm(hidden_QI, norms.get("input_norm"))
            heads_QHD = linear["qkv"](input_QI).view(len(input_QI), -1, width)
            query_QHD, key_QGD, value_QGD = torch.split(heads_QHD, split, dim=1)
            query_QHD = self._norm(query_QHD, norms.get("query_norm")) * self._weights.scaling
            key_QGD = self._norm(key_QGD, norms.get("key_norm"))
            keys_GSD, values_GSD = self._slots_2LGSD[:, number]
            out_QHD = attend(query_QHD, key_QGD, value_QGD, keys_GSD, values_GSD, metadata)
            out_QI = linear["out"](out_QHD.flatten(1))
            hidden_QI = hidden_QI + self._norm(out_QI, norms.get("attention_norm"))
            input_QI = self._norm(hidden_QI, norms.get("mlp_input_norm"))
            gate_QM, up_QM = linear["gate_up"](input_QI).chunk(2, dim=-1)
            mlp_QI = linear["down"](self._activated(gate_QM) * up_QM)
            hidden_QI = hidden_QI + self._norm(mlp_QI, norms.get("mlp_norm"))
        return self._norm(hidden_QI, self._norm_I)

    def _norm(self, input_QI: Tensor, weight_I: Tensor | None) -> Tensor:
        if weight_I is None:
            return input_QI
        return functional.rms_norm(
            input_QI, weight_I.shape, weight_I, self._weights.config.rms_norm_eps
        )


def dense(parts: Sequence[Linear]) -> Callable[[Tensor], Tensor]:
    """Return linear layers of the same inputs as one, their outputs beside each other."""
    weights, biases = [], []
    for part in parts:
        weight_OI = part.weight[:]
        if part.added is not None:
            weight_OI += part.added[1].float() @ part.added[0].float()
        weights.append(weight_OI)
        biases.append(torch.zeros(len(weight_OI)) if part.bias_O is None else part.bias_O)
    return partial(functional.linear, weight=torch.cat(weights), bias=torch.cat(biases))


def rotated(heads_QHD: Tensor, cos_QP: Tensor, sin_QP: Tensor) -> Tensor:
    x, y = heads_QHD.chunk(2, dim=-1)
    cos, sin = cos_QP[:, None], sin_QP[:, None]
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)


def attend(
    query_QHD: Tensor, key_QGD: Tensor, value_QGD: Tensor, keys_GSD: Tensor, values_GSD: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:  # fmt: skip
    """Write keys and values into their slots; return attention's output, [Q, H, D]."""
    cos_QP, sin_QP, table_N5, slots, masks = metadata
    query_QHD, key_QGD = (rotated(one, cos_QP, sin_QP) for one in (query_QHD, key_QGD))
    out_QHD = torch.empty_like(query_QHD)
    for first, queries, count, listed, masked in table_N5.tolist():
        own, seen_K = slice(first, first + queries), slots[listed : listed + count]
        for held_GSD, new_QGD in ((keys_GSD, key_QGD), (values_GSD, value_QGD)):
            held_GSD[:, seen_K[-queries:]] = new_QGD[own].transpose(0, 1).to(held_GSD.dtype)
        out_1HQD = functional.scaled_dot_product_attention(
            query_QHD[own].transpose(0, 1)[None],
            keys_GSD[None, :, seen_K].float(),
            values_GSD[None, :, seen_K].float(),
            attn_mask=masks[masked : masked + queries * count].view(queries, -1),
            scale=1.0,
            enable_gqa=True,
        )
        out_QHD[own] = out_1HQD[0].transpose(0, 1)
    return out_QHD
