"""Tensors straight from a GGUF file, as it has them.

They are mapped, not read: embeddings are dequantised row by row as tokens ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from pasta_decoding.engines.packed import LowRank, Weights
from pasta_decoding.errors import PastaError

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


class GgufTensors:
    """What a decoder asks for, from a GGUF file.

    added: what an adapter adds to its linear layers, by Hugging Face's names.
    """

    def __init__(self, path: Path, config: Any, added: Mapping[str, LowRank] | None) -> None:
        try:
            self._tensors = {one.name: one for one in GGUFReader(path).tensors}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise PastaError(f"{path} is not a GGUF file that can be read: {error}") from error
        self.added = added or {}
        if keys := self._tensors.get("blk.0.attn_k.weight"):  # transformers knows a default alone
            config.head_dim = int(keys.shape[1]) // config.num_key_value_heads
        self.is_gemma = config.model_type.startswith("gemma")
        kinds = [str(one.tensor_type.name) for one in self._tensors.values() if len(one.shape) > 1]
        self.form = max(set(kinds), key=kinds.count)
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

    def matrix(self, name: str) -> Weights:
        file_name = f"{self._file_name(name)}.weight"
        found = self._tensors.get(file_name)
        if found is None and name == "lm_head":  # tied
            found = self._tensors["token_embd.weight"]
        if found is None:
            raise PastaError(f"the GGUF file has no tensor {file_name}")
        rows = self._in_halves(name, found.data).view(np.uint8)
        return Weights(rows, found.tensor_type, int(found.shape[0]))

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
