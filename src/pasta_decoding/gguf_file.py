"""GGUF, llama.cpp's file format, read: metadata, and weights by Hugging Face's names.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Weights are mapped, not read.
The `gguf` package's own reader takes many seconds for a vocabulary of 150,000 tokens.

Shapes: O rows of a weight, N bytes of a row.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]

_VERSIONS = (2, 3)
_BROKEN = ValueError, TypeError, ArithmeticError, LookupError, RecursionError, struct.error
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9

# Names of a layer's weights: Hugging Face's, and the file's.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_BIASED = ("q_proj", "k_proj", "v_proj")
# The settings of a model that are obeyed here, or that change nothing.
_KNOWN = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *(*WIDTHS, "rope.scaling.original_context_length", "tensor_data_layout"),
}
# Where a block has its float16 numbers, in places of two bytes; all else of it is whole numbers.
_SCALES = {
    **dict.fromkeys(("F16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 1)),
    "Q6_K": (104,),
}
_REAL = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def module_names(layers: int) -> dict[str, str]:
    """Return the file's names of modules, by Hugging Face's."""
    return _WHOLE | {
        f"model.layers.{number}.{name}": f"blk.{number}.{short}"
        for number in range(layers)
        for name, short in _LAYER.items()
    }


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One weight. Indexing by rows, a slice or a list, gives them as float32.

    heads: of how many heads the rows are pairs that rotate together; Hugging Face has each head's
           first members, then its second ones. None: the rows are as there.
    """

    bytes_ON: Bytes
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    heads: int | None = None

    def rows(self) -> Bytes:
        """Return the bytes of all rows, in Hugging Face's order."""
        if self.heads is None:
            return self.bytes_ON
        pairs = self.bytes_ON.reshape(self.heads, -1, 2, self.bytes_ON.shape[1])
        return pairs.swapaxes(1, 2).reshape(self.bytes_ON.shape)

    def is_finite(self) -> bool:
        """Are all of its numbers finite? Reads the scales of blocks, where the format has them."""
        if (places := _SCALES.get(self.kind.name)) is None:
            return bool(self[:].isfinite().all())
        blocks = self.bytes_ON.reshape(-1, GGML_QUANT_SIZES[self.kind][1]).view(np.uint16)
        return not any((blocks[:, place] & 0x7C00 == 0x7C00).any() for place in places)

    def __getitem__(self, which: slice | Sequence[int]) -> Tensor:
        """Raise PastaError for a number format that is unknown here."""
        import torch

        try:
            numbers = dequantize(np.array(self.rows()[which]), self.kind)
        except NotImplementedError as error:
            raise PastaError(f"weights of the kind {self.kind.name} cannot be read") from error
        return torch.from_numpy(numbers.reshape(-1, *self.shape[1:]))


class GgufFile:
    """An open file. Raises PastaError for one that is broken, cut short, or something else.

    fields:            metadata by key.
    weights:           those with a name of Hugging Face's in `module_names`, by that name.
    frequency_factors: what divides the frequencies of rotary positions, if anything.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        try:
            with path.open("rb") as file:
                self._raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, version, tensors, fields = self._read("<4sIQQ")
            if magic != b"GGUF" or version not in _VERSIONS:
                raise ValueError(f"it begins with {magic!r}, version {version}")
            self.fields: dict[str, Any] = {self._text(): self._value() for _ in range(fields)}
            self.tensors = dict(list(self._tensors(tensors)))
        except OSError as error:
            raise PastaError(f"{path} cannot be read: {error.strerror}") from error
        except _BROKEN as error:
            raise PastaError(f"{path} is not a GGUF file that can be read: {error}") from error
        if (parts := self.fields.get("split.count", 1)) not in (0, 1):
            hint = "llama-gguf-split --merge FIRST_PART WHOLE"
            raise PastaError(f"{path} is one of the {parts} parts of a model", hint=hint)
        self.architecture = str(self.fields.get("general.architecture"))
        self.layers = min(self.field("block_count"), len(self.tensors))  # more have no weights
        self.weights = dict(self._named())
        factors = self.tensors.get("rope_freqs.weight")
        self.frequency_factors = None if factors is None else factors[:]

    def field(self, key: str, default: Any = None) -> Any:
        """Return a number of the model's own architecture. Raises PastaError if it is missing."""
        found = self.fields.get(f"{self.architecture}.{key}", default)
        kind, what = (float, "number") if key in _REAL else (int, "whole number")
        if type(found) is not kind or not 0 < found < math.inf:
            raise PastaError(f"{self.path} holds no {what} above 0 as {self.architecture}.{key}")
        return found

    def release(self) -> None:
        """Give back the memory of what was read so far; it is read again where it is needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._raw.madvise(mmap.MADV_DONTNEED)

    def _read(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._raw, self._at)
        self._at += struct.calcsize(form)
        return found

    def _text(self) -> str:
        (length,) = self._read("<Q")
        if self._at + length > len(self._raw):
            raise ValueError("it ends inside of its metadata")
        self._at += length
        return self._raw[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int | None = None) -> Any:
        kind = self._read("<I")[0] if kind is None else kind
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._read(f"<{_NUMBERS[kind]}")[0]
        kind, count = self._read("<IQ")
        if kind in (_TEXT, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        return list(self._read(f"<{count}{_NUMBERS[kind]}"))

    def _tensors(self, count: int) -> Iterator[tuple[str, GgufTensor]]:
        listed = []
        for _ in range(count):
            name, (dimensions,) = self._text(), self._read("<I")
            listed.append((name, self._read(f"<{dimensions}Q"), *self._read("<IQ")))
        alignment = self.fields.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for name, shape, number, offset in listed:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            rows, columns = (shape[0], 1) if len(shape) == 1 else (math.prod(shape[1:]), shape[0])
            row_bytes = columns // block * block_bytes
            if columns % block:
                raise ValueError(f"the rows of {name} end inside of a block")
            if start + offset + rows * row_bytes > len(self._raw):
                raise ValueError(f"it ends before the end of {name}")
            raw = np.frombuffer(self._raw, np.uint8, rows * row_bytes, start + offset)
            yield name, GgufTensor(raw.reshape(rows, row_bytes), kind, tuple(reversed(shape)))

    def _named(self) -> Iterator[tuple[str, GgufTensor]]:
        heads = {}
        if self.architecture == "llama":
            query, key = (self.field(f"attention.head_count{one}") for one in ("", "_kv"))
            heads = {"q_proj": query, "k_proj": key}
        for name, short in module_names(self.layers).items():
            for kind in ("weight", "bias"):
                if (found := self.tensors.get(f"{short}.{kind}")) is not None:
                    paired = heads.get(name.rpartition(".")[2])
                    yield f"{name}.{kind}", replace(found, heads=paired)


def refuse_unread(file: GgufFile) -> None:
    """Raise PastaError for settings and weights that would change the text unnoticed."""
    path, prefix = file.path, f"{file.architecture}."
    found = {key[len(prefix) :]: one for key, one in file.fields.items() if key.startswith(prefix)}
    if unknown := [key for key, one in found.items() if one and key not in _KNOWN]:
        raise PastaError(f"{path} sets {prefix}{unknown[0]}, which is unknown here")
    if len(widths := {file.field(key) for key in WIDTHS if key in found}) > 1:
        raise PastaError(f"{path} has heads of the widths {sorted(widths)}, not of one")
    # Where a factor stands without a type, llama.cpp scales linearly.
    factor = found.get("rope.scaling.factor") or found.get("rope.scale_linear") or 1.0
    scaling = found.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if scaling != "none":
        raise PastaError(f"{path} has rotary positions of the type {scaling}, unknown here")
    _check_weights(file)
    for name, weight in file.tensors.items():
        if not weight.is_finite():
            raise PastaError(f"{file.path} has numbers that are not finite, in {name}")
    file.release()


def _check_weights(file: GgufFile) -> None:
    """Raise PastaError for weights that are missing, unknown, misshapen, or no numbers."""
    shapes = _shapes(file)
    names = {name: short for name, short in module_names(file.layers).items()
             if name.rpartition(".")[2] in shapes}  # fmt: skip
    known = {f"{short}.{kind}" for short in names.values() for kind in ("weight", "bias")}
    if unknown := file.tensors.keys() - known - {"rope_freqs.weight"}:
        raise PastaError(f"{file.path} has weights that are unknown here, such as {min(unknown)}")
    for name, short in names.items():
        kind = name.rpartition(".")[2]
        weight, bias = (file.tensors.get(f"{short}.{one}") for one in ("weight", "bias"))
        if bias is not None and (kind not in _BIASED or bias.shape != shapes[kind][:1]):
            raise PastaError(f"{file.path} has {short}.bias, which is unknown here")
        if weight is None and kind == "lm_head":
            continue  # it is tied to the embeddings
        if weight is None:
            raise PastaError(f"{file.path} holds no {short}.weight")
        if weight.shape != shapes[kind]:
            shape = " x ".join(map(str, weight.shape))
            raise PastaError(f"{file.path} has {short}.weight in the shape {shape}")


def _shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder's weights by the last part of their modules' names."""
    if (embeddings := file.tensors.get("token_embd.weight")) is None:
        raise PastaError(f"{file.path} holds no whole model: it has no embeddings")
    hidden, inner = file.field("embedding_length"), file.field("feed_forward_length")
    heads = file.field("attention.head_count")
    width = file.field("attention.key_length", hidden // heads)
    kv_rows = file.field("attention.head_count_kv", heads) * width
    norms = ("norm", "input_layernorm", "post_attention_layernorm")
    own = ("q_norm", "k_norm") if file.architecture == "qwen3" else ()
    return {
        **dict.fromkeys(("embed_tokens", "lm_head"), (embeddings.shape[0], hidden)),
        **dict.fromkeys(norms, (hidden,)),
        **dict.fromkeys(own, (width,)),
        **dict.fromkeys(("k_proj", "v_proj"), (kv_rows, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        "q_proj": (heads * width, hidden),
        "o_proj": (hidden, heads * width),
        "down_proj": (hidden, inner),
    }
