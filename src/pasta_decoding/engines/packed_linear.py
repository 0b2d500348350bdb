"""Linear layers of a compiled pass: weights packed for one operator, and read as they are stored.

A step of few tokens costs what its weights take to read. So weights that a GGUF held in blocks of
four or eight bits stay in them, exactly: 32 inputs have a scale, and those of four bits (Q4_1) a
minimum, too (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). What an adapter adds is of
low rank, so it is computed beside them and not merged (arXiv 2106.09685, equation 3). All other
weights are merged and packed in bfloat16. The operator is in packed_linear.cpp.

An output of a token does not depend on what else the pass computes, to the bit.

Shapes: O outputs, I inputs, B = I / 32 blocks of inputs, P panels of 16 outputs, R rank, Q tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from pasta_decoding.engines.operators import LIBRARY

BLOCK = 32
PANEL = 16

LowRank = tuple[Tensor, Tensor]
"""What an adapter adds to a layer: down_RI and up_OR, whose product up @ down is added."""

LIBRARY.define(
    "linear(Tensor input, Tensor weights, Tensor? scales, Tensor? down, Tensor? up, int[] outputs)"
    " -> Tensor"
)


def _shape_only(input_QI: Tensor, *rest: Any) -> Tensor:
    return input_QI.new_empty(*input_QI.shape[:-1], sum(rest[-1]), dtype=torch.float32)


LIBRARY.impl("linear", _shape_only, "Meta")


def is_fast_here() -> bool:
    """Is the operator what this processor computes fastest with?

    It needs AVX-512 with bfloat16. AMX tiles are fed by Inductor's own templates.
    """
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(able.get("avx512_bf16")) and not torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [O, I] as the operator reads it.

    weights: bfloat16 [P, B, 512], or whole numbers: int8 [P, B, 512], or of four bits, uint8
             [P, B, 256].
    scales:  float16 [P, B, 1, 16] of eight bits; of four [P, B, 2, 16], the minimum behind it.
    """

    weights: Tensor
    scales: Tensor | None
    outputs: int


def pack(weight_OI: Tensor) -> Packed | None:
    """Pack a matrix in bfloat16; None if its inputs are no whole blocks."""
    if weight_OI.shape[1] % BLOCK:
        return None
    return Packed(_in_pairs(weight_OI.bfloat16()), None, len(weight_OI))


def pack_blocks(weight_OI: Tensor) -> Packed | None:
    """Pack a matrix that was dequantised from Q4_1 or Q8_0; None if it is not exactly one."""
    if weight_OI.dtype != torch.float32 or weight_OI.shape[1] % BLOCK:
        return None
    return _pack_four(weight_OI) or _pack_eight(weight_OI)


def _pack_four(weight_OI: Tensor) -> Packed | None:
    block_OBK = _blocks(weight_OI).double()
    low_OB1, high_OB1 = block_OBK.amin(2, keepdim=True), block_OBK.amax(2, keepdim=True)
    scale_OB1 = (high_OB1 - low_OB1) / 15
    level_OBK = _levels(block_OBK - low_OB1, scale_OB1)
    if not _are_exact(level_OBK, (scale_OB1, low_OB1), weight_OI):
        return None
    panels, blocks = _by_panel(level_OBK.int()), level_OBK.shape[1]
    # Of a quarter of a block an output has two words, four even inputs in one, the odd in another.
    shift = torch.tensor([0, 4, 8, 12])[:, None]
    words = (panels.reshape(-1, blocks, PANEL, 4, 4, 2) << shift).sum(4)  # [P, B, 16, 4, 2]
    halves = torch.stack((words & 0xFF, words >> 8), dim=-1).to(torch.uint8)
    weights = halves.transpose(2, 3).flatten(2).contiguous()
    return Packed(weights, _scales(scale_OB1, low_OB1), len(weight_OI))


def _pack_eight(weight_OI: Tensor) -> Packed | None:
    block_OBK = _blocks(weight_OI).double()
    scale_OB1 = block_OBK.abs().amax(2, keepdim=True) / 127
    level_OBK = _levels(block_OBK, scale_OB1)
    if not _are_exact(level_OBK, (scale_OB1,), weight_OI):
        return None
    weights = _in_pairs(level_OBK.to(torch.int8).flatten(1))
    return Packed(weights, _scales(scale_OB1), len(weight_OI))


def _levels(above_OBK: Tensor, scale_OB1: Tensor) -> Tensor:
    return torch.where(scale_OB1 > 0, above_OBK / scale_OB1, 0.0).round()


def _are_exact(level_OBK: Tensor, numbers: Sequence[Tensor], weight_OI: Tensor) -> bool:
    """Do levels, scale and minimum, as they are kept, give the weights back to the bit?"""
    scale_OB1, *minimum = (number_OB1.half().double() for number_OB1 in numbers)
    found_OBK = level_OBK * scale_OB1
    for low_OB1 in minimum:
        found_OBK += low_OB1
    return torch.equal(found_OBK.float().flatten(1), weight_OI)


def _blocks(weight_OI: Tensor) -> Tensor:
    return weight_OI.reshape(len(weight_OI), -1, BLOCK)


def _by_panel(block_OBK: Tensor) -> Tensor:
    """Return [P, B, 16, ...], rows of zeros behind the last one."""
    rows = -len(block_OBK) % PANEL
    padded = pad(block_OBK, (0, 0, 0, 0, 0, rows))
    return padded.reshape(-1, PANEL, *block_OBK.shape[1:]).transpose(1, 2)


def _in_pairs(weight_OI: Tensor) -> Tensor:
    """Return [P, B, 512]: of each pair of inputs, the two of each output."""
    panels = _by_panel(_blocks(weight_OI))
    pairs = panels.reshape(*panels.shape[:3], BLOCK // 2, 2).transpose(2, 3)
    return pairs.flatten(2).contiguous()


def _scales(*numbers: Tensor) -> Tensor:
    panels = [_by_panel(number_OB1)[..., 0] for number_OB1 in numbers]
    return torch.stack(panels, dim=2).half().contiguous()


class PackedLinear(nn.Module):
    """A linear layer, or several that read the same inputs, as one call of the operator.

    Returns float32 [..., O]; the outputs of several layers follow each other.
    """

    def __init__(self, parts: Sequence[Packed], added: Sequence[LowRank | None]) -> None:
        super().__init__()
        self.outputs = [part.outputs for part in parts]
        self.register_buffer("weights", torch.cat([part.weights for part in parts]))
        scales = [part.scales for part in parts if part.scales is not None]
        self.register_buffer("scales", torch.cat(scales) if scales else None)
        down, up = _pack_added(parts, added) if any(added) else (None, None)
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    def forward(self, input_QI: Tensor) -> Tensor:
        """Return float32 outputs_QO."""
        operator: Any = torch.ops.pasta.linear
        found: Tensor = operator(
            input_QI, self.weights, self.scales, self.down, self.up, self.outputs
        )
        return found


def _pack_added(parts: Sequence[Packed], added: Sequence[LowRank | None]) -> tuple[Tensor, Tensor]:
    """Pack what is added to each layer, all of one rank.

    Returns bfloat16 [layers, R / 16, B, 512] of what takes the inputs down, and [P, R * 16] of what
    brings the outputs up: of each pair of ranks, the two of each output.
    """
    given = [one for one in added if one is not None]
    inputs, rank = given[0][0].shape[1], max(len(down_RI) for down_RI, _ in given)
    rank += -rank % PANEL
    downs, ups = [], []
    for part, one in zip(parts, added, strict=True):
        down_RI, up_OR = one or (torch.zeros(0, inputs), torch.zeros(part.outputs, 0))
        downs.append(_in_pairs(pad(down_RI, (0, 0, 0, rank - len(down_RI))).bfloat16()))
        ups.append(pad(up_OR, (0, rank - len(down_RI))))
    up_PBLR = _by_panel(torch.cat(ups).bfloat16()[:, None])  # B is 1: ranks are no blocks
    up = up_PBLR.reshape(len(up_PBLR), PANEL, rank // 2, 2).transpose(1, 2).flatten(1)
    return torch.stack(downs), up.contiguous()


class _Last:
    """What a call took and gave, so that layers that read the same inputs share one."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.output: Tensor | None = None


class _Layer(nn.Module):
    """One layer's share of a call, traced in the place of a linear layer.

    dtype: of what it returns; None for float32.
    """

    def __init__(
        self, called: PackedLinear, last: _Last, outputs: slice, bias_O: Tensor | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.called, self._last, self._outputs, self._dtype = called, last, outputs, dtype
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias_O is None else bias_O.detach().float())

    def forward(self, input_QI: Tensor) -> Tensor:
        last = self._last
        if last.input is not input_QI:
            last.input, last.output = input_QI, self.called(input_QI)
        assert last.output is not None
        found = last.output[..., self._outputs]
        found = found if self.bias is None else found + self.bias
        return found if self._dtype is None else found.to(self._dtype)


def packed_layers(
    model: PreTrainedModel, added: Mapping[str, LowRank] | None = None
) -> dict[str, nn.Module]:
    """Return what computes the linear layers of a model, by their names, in bfloat16.

    added: what an adapter adds to them by their names, where it is not merged. Layers whose inputs
    are no whole blocks are left out, and so are those that are no plain `nn.Linear`.
    """
    added = added or {}
    head = model.get_output_embeddings()
    linears = {name: one for name, one in model.named_modules() if type(one) is nn.Linear}
    together: dict[object, list[tuple[str, Packed, LowRank | None]]] = {}
    for name, inputs in _inputs(model, linears).items():
        weight_OI, own = linears[name].weight.detach(), added.get(name)
        packed = pack_blocks(weight_OI)
        if packed is None:
            packed, own = pack(_merged(weight_OI, own)), None
        if packed is None:
            continue
        alone = name if packed.outputs % PANEL else None
        kind = (inputs, packed.weights.dtype, packed.weights.shape[2], alone)
        together.setdefault(kind, []).append((name, packed, own))
    found: dict[str, nn.Module] = {}
    for layers in together.values():
        names, parts, additions = zip(*layers, strict=True)
        called, last, first = PackedLinear(parts, additions), _Last(), 0
        for name, part in zip(names, parts, strict=True):
            linear = linears[name]
            outputs = slice(first, first + part.outputs)
            dtype = None if linear is head else torch.bfloat16
            found[name] = _Layer(called, last, outputs, linear.bias, dtype)
            first = outputs.stop
    return found


def _inputs(model: PreTrainedModel, linears: Mapping[str, nn.Linear]) -> dict[str, int]:
    """Number what each layer is given: those with the same number are given the same inputs."""
    given: dict[str, Tensor] = {}
    with ExitStack() as stack, torch.inference_mode():
        for name, linear in linears.items():

            def note(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                given[name] = inputs[0]

            stack.callback(linear.register_forward_pre_hook(note).remove)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return {name: id(inputs) for name, inputs in given.items()}


def _merged(weight_OI: Tensor, added: LowRank | None) -> Tensor:
    return weight_OI if added is None else weight_OI.float() + added[1].float() @ added[0].float()


@contextmanager
def in_place_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let a model compute with these layers for a while."""
    own = {name: model.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        yield
    finally:
        for name, layer in own.items():
            model.set_submodule(name, layer)
