"""Weights of linear layers, as files have them and as the C++ operators read them (packed.h).

Weights in blocks of a GGUF file stay in them, and give the file's values exactly
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Shapes: O outputs, I inputs, N blocks of 32 inputs, R rank.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from pasta_decoding.errors import PastaError

BLOCK = 32
CHUNK = 2**17  # weights that fit a processor's cache

LowRank = tuple[Tensor, Tensor]
"""What an adapter adds to a layer: down_RI and up_OR, whose product up @ down is added."""


PACKED = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K})
"""Kinds whose blocks the operators read as they are."""


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


class LayerStruct(ctypes.Structure):
    """See linear.cpp."""

    _fields_ = (
        ("main", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("first", ctypes.c_int64),
    )


class Matrix:
    """A matrix in the library's own memory; kinds that it does not read become float32."""

    def __init__(self, library: Any, weights: Weights) -> None:
        if weights.kind not in PACKED | {Kind.F32, Kind.BF16}:
            weights = Weights.of(weights.dense())
        rows, self.outputs = np.ascontiguousarray(weights.rows), len(weights.rows)
        self.pointer = library.pasta_pack(
            int(weights.kind), rows.ctypes.data, rows.strides[0], self.outputs, weights.inputs,
            torch.get_num_threads(),
        )  # fmt: skip
        weakref.finalize(self, library.pasta_free, self.pointer)
