"""Weights straight from a GGUF file: its blocks become those of the operator, value by value.

The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. Tensors are mapped, not
read: embeddings are dequantised row by row as tokens ask for them.

Shapes: O outputs, B blocks of 32 inputs, N bytes of a block, S super-blocks of 256 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from pasta_decoding.engines.packed import LowRank, Packed, pack, pack_eight, pack_four
from pasta_decoding.errors import PastaError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The names of a layer's tensors: Hugging Face's, and the file's.
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
_GEMMA_LAYER = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GgufWeights:
    """What a decoder asks of weights, from a GGUF file.

    added: what an adapter adds to its linear layers, by Hugging Face's names.
    """

    def __init__(
        self, path: Path, config: Any, added: Mapping[str, LowRank] | None, *, packed: bool
    ) -> None:
        try:
            self._tensors = {one.name: one for one in GGUFReader(path).tensors}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise PastaError(f"{path} is not a GGUF file that can be read: {error}") from error
        self.added, self._packed = added or {}, packed
        if keys := self._tensors.get("blk.0.attn_k.weight"):  # transformers knows a default alone
            config.head_dim = int(keys.shape[1]) // config.num_key_value_heads
        self.is_gemma = config.model_type.startswith("gemma")
        kinds = [str(one.tensor_type.name) for one in self._tensors.values() if len(one.shape) > 1]
        self.form = max(set(kinds), key=kinds.count) if packed else "float32"
        # llama.cpp rotates pairs that lie beside each other in this family.
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._heads = heads if config.model_type in ("llama", "mistral") else {}

    def vector(self, name: str) -> Tensor | None:
        layer, _, kind = name.rpartition(".")
        found = self._tensors.get(f"{self._file_name(layer)}.{kind}")
        if found is None:
            return None
        rows = self._in_halves(layer, np.asarray(found.data, dtype=np.float32)[:, None])
        return torch.from_numpy(rows[:, 0].copy())

    def norm(self, name: str) -> Tensor | None:
        """Return a norm's weights; the file has Gemma's with their 1 added."""
        return self.vector(f"{name}.weight")

    @property
    def frequency_factors(self) -> Tensor | None:
        found = self._tensors.get("rope_freqs.weight")
        return None if found is None else torch.from_numpy(np.array(found.data, dtype=np.float32))

    def embed(self, ids: Sequence[int]) -> Tensor:
        found = self._tensors["token_embd.weight"]
        return torch.from_numpy(dequantize(found.data[list(ids)], found.tensor_type))

    def matrix(self, name: str) -> Packed | Tensor:
        file_name = f"{self._file_name(name)}.weight"
        found = self._tensors.get(file_name)
        if found is None and name == "lm_head":  # tied
            found = self._tensors["token_embd.weight"]
        if found is None:
            raise PastaError(f"the GGUF file has no tensor {file_name}")
        rows, kind = self._in_halves(name, found.data), found.tensor_type
        if self._packed and kind in BLOCKS:
            return BLOCKS[kind](np.ascontiguousarray(rows))
        try:
            weight_OI = torch.from_numpy(dequantize(rows, kind).copy())
        except NotImplementedError as error:
            raise PastaError(f"weights of the kind {kind.name} are not computed here") from error
        if not self._packed:
            return weight_OI
        return pack(weight_OI.bfloat16() if kind == GGMLQuantizationType.BF16 else weight_OI)

    def _file_name(self, name: str) -> str:
        if name in _WHOLE:
            return _WHOLE[name]
        _, _, number, own = name.split(".", 3)
        return f"blk.{number}.{(_GEMMA_LAYER if self.is_gemma else _LAYER).get(own)}"

    def _in_halves(self, name: str, rows: Any) -> Any:
        """Return the rows with each head's pairs in two halves, as Hugging Face has them."""
        heads = self._heads.get(name.rpartition(".")[2])
        if heads is None:
            return rows
        pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def _blocks(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(len(rows), -1, size)


def _halves(bytes_: Bytes) -> Floats:
    """Return float16 numbers, two bytes each, as float32."""
    return bytes_.copy().view(np.float16)[..., 0].astype(np.float32)


def _nibbles(bytes_OBN: Bytes) -> Bytes:
    """Return the low halves of all bytes, then the high ones."""
    return np.concatenate((bytes_OBN & 15, bytes_OBN >> 4), axis=-1)


def _four(level_OBK: Bytes, scale_OB: Floats, minimum_OB: Floats) -> Packed:
    return pack_four(*map(torch.from_numpy, (level_OBK, scale_OB, minimum_OB)))


def _eight(level_OBK: npt.NDArray[np.int8], scale_OB: Floats) -> Packed:
    return pack_eight(torch.from_numpy(level_OBK), torch.from_numpy(scale_OB))


def _q4_0(rows: Bytes) -> Packed:
    block_OBN = _blocks(rows, 18)
    scale_OB = _halves(block_OBN[..., :2])
    return _four(_nibbles(block_OBN[..., 2:]), scale_OB, -8 * scale_OB)


def _q4_1(rows: Bytes) -> Packed:
    block_OBN = _blocks(rows, 20)
    level_OBK = _nibbles(block_OBN[..., 4:])
    return _four(level_OBK, _halves(block_OBN[..., :2]), _halves(block_OBN[..., 2:4]))


def _q5_0(rows: Bytes) -> Packed:
    block_OBN = _blocks(rows, 22)
    fifth_OBK = np.unpackbits(block_OBN[..., 2:6], axis=-1, bitorder="little")
    level_OBK = (_nibbles(block_OBN[..., 6:]) | fifth_OBK << 4).astype(np.int8) - 16
    return _eight(level_OBK.astype(np.int8), _halves(block_OBN[..., :2]))


def _q8_0(rows: Bytes) -> Packed:
    block_OBN = _blocks(rows, 34)
    return _eight(block_OBN[..., 2:].copy().view(np.int8), _halves(block_OBN[..., :2]))


def _q4_k(rows: Bytes) -> Packed:
    block_OSN = _blocks(rows, 144)
    scale_OS1, least_OS1 = (_halves(block_OSN[..., at : at + 2])[..., None] for at in (0, 2))
    # Eight numbers of six bits for scales, eight for minima, in twelve bytes.
    low, middle, mixed = (block_OSN[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=-1)
    minima = np.concatenate((middle & 63, mixed >> 4 | middle >> 6 << 4), axis=-1)
    quads = block_OSN[..., 16:].reshape(*block_OSN.shape[:2], 4, 32)
    levels = np.stack((quads & 15, quads >> 4), axis=3)
    return _four(
        levels.reshape(len(rows), -1, 32),
        (scale_OS1 * scales).reshape(len(rows), -1),
        -(least_OS1 * minima).reshape(len(rows), -1),
    )


def _q6_k(rows: Bytes) -> Packed:
    block_OSN = _blocks(rows, 210)
    low = block_OSN[..., :128].reshape(*block_OSN.shape[:2], 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=3).reshape(*block_OSN.shape[:2], 2, 4, 32)
    packed = block_OSN[..., 128:192].reshape(*block_OSN.shape[:2], 2, 1, 32)
    high = np.stack([packed[..., 0, :] >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
    level = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = block_OSN[..., 192:208].copy().view(np.int8)
    scale_OB = _halves(block_OSN[..., 208:])[..., None] * scales
    return _eight(level.reshape(len(rows), -1, 32), scale_OB.reshape(len(rows), -1))


_KIND = GGMLQuantizationType
BLOCKS: Mapping[GGMLQuantizationType, Callable[[Bytes], Packed]] = {
    _KIND.Q4_0: _q4_0,
    _KIND.Q4_1: _q4_1,
    _KIND.Q5_0: _q5_0,
    _KIND.Q8_0: _q8_0,
    _KIND.Q4_K: _q4_k,
    _KIND.Q6_K: _q6_k,
}
