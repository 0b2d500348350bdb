"""A reader of GGUF, llama.cpp's file format: metadata, and weights by Hugging Face's names.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Weights are mapped into
memory, and read where they are used. The reader of the package `gguf` takes many seconds for a
vocabulary of 150,000 tokens.

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
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Types of metadata that are numbers, with their codes in the module `struct`."""
_TEXT = 8
_ARRAY = 9

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
_SUPPORTED_SETTINGS = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    *WIDTHS,
}
"""Settings of a model that Pasta obeys, or that change nothing."""
# Indices of the float16 numbers in a block, in units of two bytes. Its other numbers are integers.
_SCALE_INDICES = {
    **dict.fromkeys(("F16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 1)),
    "Q6_K": (104,),
}
_REAL_SETTINGS = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
_OUTER_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def module_names(layers: int) -> dict[str, str]:
    """Return the file's names of modules, by Hugging Face's names."""
    names = dict(_OUTER_MODULES)
    for layer in range(layers):
        for name, short in _LAYER.items():
            names[f"model.layers.{layer}.{name}"] = f"blk.{layer}.{short}"
    return names


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One weight. `weight[rows]` gives rows as float32; `rows` is a slice or a list.

    heads: None if the rows have Hugging Face's order. Else rows of this number of heads are in
           llama.cpp's order: rows that rotate together are neighbours. Hugging Face has the first
           rows of all pairs of a head, then the second ones.
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
        indices = _SCALE_INDICES.get(self.kind.name)
        if indices is None:
            return bool(self[:].isfinite().all())
        blocks = self.bytes_ON.reshape(-1, GGML_QUANT_SIZES[self.kind][1]).view(np.uint16)
        # In float16, all bits of the exponent are set in infinities and NaN only.
        return not any((blocks[:, index] & 0x7C00 == 0x7C00).any() for index in indices)

    def __getitem__(self, rows: slice | Sequence[int]) -> Tensor:
        """Return rows as float32. Raises PastaError for a number format that is unknown here."""
        import torch

        try:
            numbers = dequantize(np.array(self.rows()[rows]), self.kind)
        except NotImplementedError as error:
            raise PastaError(f"weights of the kind {self.kind.name} cannot be read") from error
        return torch.from_numpy(numbers.reshape(-1, *self.shape[1:]))


class GgufFile:
    """An open file. Raises PastaError for a file that is broken, cut short, or of another format.

    fields:            metadata by key.
    tensors:           all weights, by the file's names.
    weights:           weights of the modules in `module_names`, by Hugging Face's names.
    frequency_factors: divisors of the frequencies of rotary positions; None if there are none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
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
        self.weights = dict(self._named_weights())
        factors = self.tensors.get("rope_freqs.weight")
        self.frequency_factors = None if factors is None else factors[:]

    def field(self, key: str, default: Any = None) -> Any:
        """Return a number of the model's own architecture. Raises PastaError if it is missing."""
        number = self.fields.get(f"{self.architecture}.{key}", default)
        is_real = key in _REAL_SETTINGS
        if type(number) is not (float if is_real else int) or not 0 < number < math.inf:
            kind = "number" if is_real else "whole number"
            raise PastaError(f"{self.path} holds no {kind} above 0 as {self.architecture}.{key}")
        return number

    def release(self) -> None:
        """Give back the memory of all pages that were read; later uses read them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._raw.madvise(mmap.MADV_DONTNEED)

    def _read(self, form: str) -> tuple[Any, ...]:
        """Return the numbers at the current offset, and advance. `form` is a format of `struct`."""
        numbers = struct.unpack_from(form, self._raw, self._offset)
        self._offset += struct.calcsize(form)
        return numbers

    def _text(self) -> str:
        (length,) = self._read("<Q")
        end = self._offset + length
        if end > len(self._raw):
            raise ValueError("it ends inside of its metadata")
        text = self._raw[self._offset : end]
        self._offset = end
        return text.decode("utf-8", "replace")

    def _value(self, kind: int | None = None) -> Any:
        """Read a value of metadata. `kind` is its type; None reads the type first."""
        if kind is None:
            (kind,) = self._read("<I")
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._read(f"<{_NUMBERS[kind]}")[0]
        kind, count = self._read("<IQ")
        if kind in (_TEXT, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        return list(self._read(f"<{count}{_NUMBERS[kind]}"))

    def _tensors(self, count: int) -> Iterator[tuple[str, GgufTensor]]:
        """Read the list of `count` weights; map their bytes, which follow it."""
        entries = []
        for _ in range(count):
            name = self._text()
            (dimensions,) = self._read("<I")
            shape = self._read(f"<{dimensions}Q")  # the length of a row comes first
            type_number, offset = self._read("<IQ")
            entries.append((name, shape, type_number, offset))
        alignment = self.fields.get("general.alignment", 32)
        start = -(-self._offset // alignment) * alignment  # rounded up
        for name, shape, type_number, offset in entries:
            kind = GGMLQuantizationType(type_number)
            block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
            if len(shape) == 1:  # a vector: each number is a row
                rows = shape[0]
                columns = 1
            else:
                rows = math.prod(shape[1:])
                columns = shape[0]
            if columns % block_numbers:
                raise ValueError(f"the rows of {name} end inside of a block")
            row_bytes = columns // block_numbers * block_bytes
            if start + offset + rows * row_bytes > len(self._raw):
                raise ValueError(f"it ends before the end of {name}")
            raw = np.frombuffer(self._raw, np.uint8, rows * row_bytes, start + offset)
            yield name, GgufTensor(raw.reshape(rows, row_bytes), kind, tuple(reversed(shape)))

    def _named_weights(self) -> Iterator[tuple[str, GgufTensor]]:
        heads = {}
        if self.architecture == "llama":
            heads["q_proj"] = self.field("attention.head_count")
            heads["k_proj"] = self.field("attention.head_count_kv")
        for name, short in module_names(self.layers).items():
            for kind in ("weight", "bias"):
                tensor = self.tensors.get(f"{short}.{kind}")
                if tensor is not None:
                    yield f"{name}.{kind}", replace(tensor, heads=heads.get(_last_part(name)))


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def refuse_unread(file: GgufFile) -> None:
    """Raise PastaError for settings and weights that would change the text unnoticed."""
    path = file.path
    prefix = f"{file.architecture}."
    settings = {
        key.removeprefix(prefix): value
        for key, value in file.fields.items()
        if key.startswith(prefix)
    }
    for key, value in settings.items():
        if value and key not in _SUPPORTED_SETTINGS:
            raise PastaError(f"{path} sets {prefix}{key}, which is unknown here")
    widths = {file.field(key) for key in WIDTHS if key in settings}
    if len(widths) > 1:
        raise PastaError(f"{path} has heads of the widths {sorted(widths)}, not of one")
    # llama.cpp scales linearly where there is a factor and no type.
    factor = settings.get("rope.scaling.factor") or settings.get("rope.scale_linear") or 1.0
    scaling = settings.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
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
    names = {
        name: short
        for name, short in module_names(file.layers).items()
        if _last_part(name) in shapes
    }
    expected = {f"{short}.{kind}" for short in names.values() for kind in ("weight", "bias")}
    unknown = file.tensors.keys() - expected - {"rope_freqs.weight"}
    if unknown:
        raise PastaError(f"{file.path} has weights that are unknown here, such as {min(unknown)}")
    for name, short in names.items():
        module = _last_part(name)
        weight = file.tensors.get(f"{short}.weight")
        bias = file.tensors.get(f"{short}.bias")
        if bias is not None and (module not in _BIASED or bias.shape != shapes[module][:1]):
            raise PastaError(f"{file.path} has {short}.bias, which is unknown here")
        if weight is None and module == "lm_head":
            continue  # it is tied to the embeddings
        if weight is None:
            raise PastaError(f"{file.path} holds no {short}.weight")
        if weight.shape != shapes[module]:
            shape = " x ".join(map(str, weight.shape))
            raise PastaError(f"{file.path} has {short}.weight in the shape {shape}")


def _shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder's weights by the last part of their modules' names."""
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise PastaError(f"{file.path} holds no whole model: it has no embeddings")
    vocabulary_size = embeddings.shape[0]
    hidden = file.field("embedding_length")
    inner = file.field("feed_forward_length")
    heads = file.field("attention.head_count")
    width = file.field("attention.key_length", hidden // heads)
    kv_rows = file.field("attention.head_count_kv", heads) * width
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocabulary_size, hidden),
        "lm_head": (vocabulary_size, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "q_proj": (heads * width, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, heads * width),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    if file.architecture == "qwen3":
        shapes["q_norm"] = (width,)
        shapes["k_norm"] = (width,)
    return shapes
