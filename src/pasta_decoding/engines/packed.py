"""Weights of linear layers as the C++ operator reads them (linear.cpp): 32, 16, 8 or 4 bits.

Weights that a GGUF held in blocks stay in them, and give the file's values exactly
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Shapes: O outputs, I inputs, B = I / 32 blocks of inputs, P panels of 16 outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

BLOCK = 32
PANEL = 16


LowRank = tuple[Tensor, Tensor]
"""What an adapter adds to a layer: down_RI and up_OR, whose product up @ down is added."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [O, I].

    weights: float32 [P, B, 512], input by input; of each pair of inputs the two of each output:
             bfloat16 [P, B, 512], or int8 [P, B, 512]; or whole numbers of four bits, uint8
             [P, B, 256].
    scales:  float32 [P, B, 1, 16] of eight bits, [P, 2 * B, 1, 16] where 16 inputs share one; of
             four bits [P, B, 2, 16], a minimum behind each.
    """

    weights: Tensor
    scales: Tensor | None
    outputs: int


def pack(weight_OI: Tensor) -> Packed:
    """Pack a matrix in its own number format, float32 or bfloat16."""
    blocks_PBOK = _by_panel(_blocks(pad(weight_OI, (0, -weight_OI.shape[1] % BLOCK))))
    if weight_OI.dtype == torch.bfloat16:
        return Packed(_in_pairs(blocks_PBOK), None, len(weight_OI))
    weights = blocks_PBOK.float().transpose(2, 3).flatten(2).contiguous()
    return Packed(weights, None, len(weight_OI))


def pack_four(level_OBK: Tensor, scale_OB: Tensor, minimum_OB: Tensor) -> Packed:
    """Pack whole numbers from 0 to 15: a weight is scale * number + minimum."""
    panels = _by_panel(level_OBK.to(torch.uint8))
    # Of a quarter of a block an output has two words: four even inputs in one, the odd in another.
    words = panels.reshape(*panels.shape[:3], 4, 2, 2, 2)  # quarter, byte, half a byte, odd
    halves = (words[..., 0, :] | words[..., 1, :] << 4).transpose(4, 5)  # quarter, odd, byte
    weights = halves.transpose(2, 3).flatten(2).contiguous()
    return Packed(weights, _scales(scale_OB, minimum_OB), len(level_OBK))


def pack_eight(level_OBK: Tensor, scale_OB: Tensor) -> Packed:
    """Pack whole numbers from -128 to 127, times a scale a block, or a half of one."""
    weights = _in_pairs(_by_panel(level_OBK.to(torch.int8)))
    return Packed(weights, _scales(scale_OB), len(level_OBK))


def pack_exactly(weight_OI: Tensor) -> Packed | None:
    """Pack a matrix that was dequantised from Q4_1 or Q8_0; None if it is not exactly one."""
    if weight_OI.dtype != torch.float32 or weight_OI.shape[1] % BLOCK:
        return None
    for parts in (_parts_of_four, _parts_of_eight):
        if _gives(parts(weight_OI[:PANEL]), weight_OI[:PANEL]):  # most others are found out here
            found = parts(weight_OI)
            if _gives(found, weight_OI):
                return pack_four(*found) if len(found) == 3 else pack_eight(*found)
    return None


def _parts_of_four(weight_OI: Tensor) -> tuple[Tensor, ...]:
    """Return the levels that Q4_1 would have, their scales and minima."""
    block_OBK = _blocks(weight_OI)
    low_OB, high_OB = block_OBK.amin(2), block_OBK.amax(2)
    scale_OB, low_OB = ((high_OB - low_OB) / 15).half().float(), low_OB.half().float()
    return _levels(block_OBK - low_OB[..., None], scale_OB), scale_OB, low_OB


def _parts_of_eight(weight_OI: Tensor) -> tuple[Tensor, ...]:
    """Return the levels that Q8_0 would have, and their scales."""
    block_OBK = _blocks(weight_OI)
    scale_OB = (block_OBK.abs().amax(2) / 127).half().float()
    return _levels(block_OBK, scale_OB), scale_OB


def _levels(above_OBK: Tensor, scale_OB: Tensor) -> Tensor:
    return torch.where(scale_OB[..., None] > 0, above_OBK / scale_OB[..., None], 0.0).round_()


def _gives(parts: Sequence[Tensor], weight_OI: Tensor) -> bool:
    """Are these, computed as a file's reader does, the weights to the bit?"""
    level_OBK, scale_OB, *minimum = parts
    found_OBK = level_OBK * scale_OB[..., None]
    for low_OB in minimum:
        found_OBK += low_OB[..., None]
    return torch.equal(found_OBK.flatten(1), weight_OI)


class Product:
    """Layers of the same inputs as one call of the operator, with what an adapter adds to them."""

    def __init__(self, parts: Sequence[Packed], added: Sequence[LowRank | None]) -> None:
        scales = [part.scales for part in parts if part.scales is not None]
        self.outputs = [part.outputs for part in parts]
        self._weights = torch.cat([part.weights for part in parts])
        self._scales = torch.cat(scales) if scales else None
        self._down, self._up = None, None
        if stacked := stack(added, self.outputs):
            # The operator reads ranks in whole blocks.
            down_RI, up_OR = (one.bfloat16() for one in stacked)
            rank = -len(down_RI) % BLOCK
            self._down = pack(pad(down_RI, (0, 0, 0, rank))).weights
            self._up = pack(pad(up_OR, (0, rank))).weights

    def __call__(self, input_QI: Tensor) -> Tensor:
        operator: Any = torch.ops.pasta_fast.linear
        found_QO: Tensor = operator(
            input_QI, self._weights, self._scales, sum(self.outputs), self._down, self._up
        )
        return found_QO


class DenseProduct:
    """The same by torch, where there is no compiler."""

    def __init__(self, parts: Sequence[Tensor], added: Sequence[LowRank | None]) -> None:
        self.outputs = [len(part) for part in parts]
        self._weight_OI = torch.cat(list(parts))
        if stacked := stack(added, self.outputs):
            self._weight_OI += stacked[1].float() @ stacked[0].float()

    def __call__(self, input_QI: Tensor) -> Tensor:
        return linear(input_QI, self._weight_OI)


def products(
    parts: Sequence[Packed | Tensor], added: Sequence[LowRank | None]
) -> list[Product | DenseProduct]:
    """Return layers of the same inputs in as few products as their number formats allow."""
    packed = [part for part in parts if isinstance(part, Packed)]
    if not packed:
        return [DenseProduct([part for part in parts if isinstance(part, Tensor)], added)]
    kinds = {
        (one.weights.dtype, one.scales is None or one.scales.shape[1:], one.outputs % PANEL)
        for one in packed
    }
    if len(kinds) == 1 and not packed[0].outputs % PANEL:
        return [Product(packed, added)]
    return [Product([part], [one]) for part, one in zip(packed, added, strict=True)]


def stack(added: Sequence[LowRank | None], outputs: Sequence[int]) -> LowRank | None:
    """Return what is added to several layers as one: their ranks follow each other."""
    given = next((one for one in added if one is not None), None)
    if given is None:
        return None
    inputs = given[0].shape[1]
    each = [
        one or (torch.zeros(0, inputs), torch.zeros(size, 0))
        for one, size in zip(added, outputs, strict=True)
    ]
    down_RI = torch.cat([one[0].float() for one in each])
    block_diagonal: Any = torch.block_diag
    return down_RI, block_diagonal(*(one[1].float() for one in each))


def _blocks(weight_OI: Tensor) -> Tensor:
    return weight_OI.reshape(len(weight_OI), -1, BLOCK)


def _by_panel(block_OBK: Tensor) -> Tensor:
    """Return [P, B, 16, ...], rows of zeros behind the last one."""
    padded = pad(block_OBK, (0, 0, 0, 0, 0, -len(block_OBK) % PANEL))
    return padded.reshape(-1, PANEL, *block_OBK.shape[1:]).transpose(1, 2)


def _in_pairs(blocks_PBOK: Tensor) -> Tensor:
    pairs = blocks_PBOK.reshape(*blocks_PBOK.shape[:3], BLOCK // 2, 2).transpose(2, 3)
    return pairs.flatten(2).contiguous()


def _scales(*numbers_OB: Tensor) -> Tensor:
    panels = [_by_panel(one_OB[..., None])[..., 0] for one_OB in numbers_OB]
    return torch.stack(panels, dim=2).float().contiguous()
