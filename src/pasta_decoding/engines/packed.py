"""Weights of linear layers, as files have them and as the C++ operators read them (packed.h).

Weights in blocks of a GGUF file stay in them, and give the file's values exactly
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Shapes: O outputs, I inputs, P panels of 16 outputs, B blocks of 32 inputs, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from pasta_decoding.errors import PastaError

BLOCK = 32
PANEL = 16
CHUNK = 2**17  # weights that fit a processor's cache

LowRank = tuple[Tensor, Tensor]
"""What an adapter adds to a layer: down_RI and up_OR, whose product up @ down is added."""


class Form(NamedTuple):
    """How a kind of weights is packed.

    bits:         of a weight.
    scale_inputs: inputs that share a float16 scale; 0: there is none.
    groups:       groups of inputs, in a block, with a factor of the scale; 0: there is none.
    """

    bits: int
    scale_inputs: int = 0
    groups: int = 0


FORMS: Mapping[Kind, Form] = {
    Kind.F32: Form(32),
    Kind.BF16: Form(16),
    Kind.Q4_0: Form(4, 32),
    Kind.Q4_1: Form(4, 32),
    Kind.Q5_0: Form(8, 32),
    Kind.Q8_0: Form(8, 32),
    Kind.Q4_K: Form(4, 256, 1),
    Kind.Q6_K: Form(8, 256, 2),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix [O, I] as a file has it: a row's bytes [O, ...] follow each other."""

    rows: npt.NDArray[np.uint8]
    kind: Kind
    inputs: int

    @classmethod
    def of(cls, weight_OI: Tensor) -> Weights:
        """Return a tensor's weights, in bfloat16 or float32."""
        kind = Kind.BF16 if weight_OI.dtype == torch.bfloat16 else Kind.F32
        numbers = weight_OI if kind is Kind.BF16 else weight_OI.float()
        return cls(numbers.contiguous().view(torch.uint8).numpy(), kind, weight_OI.shape[1])

    def in_blocks(self) -> Weights:
        """Return the same weights in blocks if they were dequantised from Q4_1 or Q8_0."""
        if self.kind is Kind.F32 and self.inputs % BLOCK == 0:
            some = torch.split(
                torch.from_numpy(self.rows.view(np.float32)), -(-CHUNK // self.inputs)
            )
            for kind in (Kind.Q4_1, Kind.Q8_0):
                parts = []
                for rows in some:
                    if (found := _blocks(rows, kind)) is None:
                        break
                    parts.append(found)
                else:
                    return Weights(np.concatenate(parts), kind, self.inputs)
        return self

    def dense(self) -> Tensor:
        """Return weight_OI in float32."""
        try:
            return torch.from_numpy(dequantize(self.rows, self.kind).copy())
        except NotImplementedError as error:
            raise PastaError(
                f"weights of the kind {self.kind.name} are not computed here"
            ) from error


def _blocks(weight_OI: Tensor, kind: Kind) -> npt.NDArray[np.uint8] | None:
    """Return rows in blocks of Q4_1 or Q8_0; None where that would change a value."""
    number_N32 = weight_OI.reshape(-1, BLOCK)
    low_N1, high_N1 = number_N32.aminmax(dim=1, keepdim=True)
    least, most = 0, 15
    if kind is Kind.Q8_0:
        low_N1, high_N1 = torch.zeros_like(low_N1), torch.maximum(high_N1, -low_N1)
        least, most = -127, 127
    scale_N1, low_N1 = ((high_N1 - low_N1) / most).half(), low_N1.half()
    step_N1, first_N1 = scale_N1.float(), low_N1.float()
    level_N32 = ((number_N32 - first_N1) / step_N1).round_().nan_to_num_(0).clamp_(least, most)
    if not torch.equal(level_N32 * step_N1 + first_N1, number_N32):
        return None
    level_N32 = level_N32.to(torch.int8)
    parts = [scale_N1, level_N32]
    if kind is Kind.Q4_1:
        parts = [scale_N1, low_N1, level_N32[:, :16] | level_N32[:, 16:] << 4]
    block_NB = torch.cat([one.view(torch.uint8) for one in parts], dim=1)
    return block_NB.view(len(weight_OI), -1).numpy()


class Matrix(ctypes.Structure):
    """See packed.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("scale_blocks", ctypes.c_int64),
        ("groups", ctypes.c_int64),
    )


class LayerStruct(ctypes.Structure):
    """See linear.cpp."""

    _fields_ = (
        ("main", Matrix),
        ("down", Matrix),
        ("up", Matrix),
        ("bias", ctypes.c_void_p),
        ("first", ctypes.c_int64),
    )


def pack(library: Any, weights: Weights, held: list[object]) -> Matrix:
    """Pack a matrix into memory that is added to `held`; kinds outside `FORMS` become float32."""
    if weights.kind not in FORMS:
        weights = Weights.of(weights.dense())
    form, outputs = FORMS[weights.kind], len(weights.rows)
    panels, blocks = -(-outputs // PANEL), -(-weights.inputs // BLOCK)
    numbers = PANEL * (2 if form.bits == 4 else 1)
    supers = weights.inputs // form.scale_inputs if form.scale_inputs else 0
    parts = [
        torch.zeros(panels * blocks * BLOCK * PANEL * form.bits // 8, dtype=torch.uint8),
        torch.zeros(panels * supers * numbers, dtype=torch.float16),
        torch.zeros(panels * blocks * form.groups * numbers, dtype=torch.int8),
    ]
    held.append(parts)
    pointers = [one.data_ptr() if one.numel() else None for one in parts]
    groups = form.groups or 1
    matrix = Matrix(*pointers, form.bits, outputs, blocks, form.scale_inputs // BLOCK, groups)
    rows = np.ascontiguousarray(weights.rows)
    library.pasta_pack(
        ctypes.byref(matrix), int(weights.kind), rows.ctypes.data, rows.strides[0],
        weights.inputs, torch.get_num_threads(),
    )  # fmt: skip
    return matrix
