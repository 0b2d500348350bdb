"""Tensors straight from a GGUF file, as it has them.

They are mapped, not read: embeddings are dequantised row by row as tokens ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pasta_decoding.engines.packed import LowRank, Weights
from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile

_EMBEDDINGS = "model.embed_tokens"


class GgufTensors:
    """A decoder's weights, from a GGUF file.

    added: an adapter's low-rank additions, by Hugging Face's names; embeddings are one layer.
    """

    def __init__(self, file: GgufFile, config: Any, added: Mapping[str, LowRank] | None) -> None:
        self._weights, self.frequency_factors = file.weights, file.frequency_factors
        self.added = added or {}
        self.is_gemma = config.model_type.startswith("gemma")
        kinds = [one.kind.name for one in self._weights.values() if len(one.shape) > 1]
        self.form = max(set(kinds), key=kinds.count)

    def vector(self, name: str) -> Tensor | None:
        found = self._weights.get(name)
        return None if found is None else found[:]

    def norm(self, name: str) -> Tensor | None:
        """Return a norm's weights; the file has Gemma's with their 1 added."""
        return self.vector(f"{name}.weight")

    def embed(self, ids: Sequence[int]) -> Tensor:
        row_QI = self._weights[f"{_EMBEDDINGS}.weight"][ids]
        if added := self.added.get(_EMBEDDINGS):
            down_RI, up_OR = added
            row_QI += up_OR[ids] @ down_RI
        return row_QI

    def matrix(self, name: str) -> Weights:
        tied = self._weights.get(f"{_EMBEDDINGS}.weight") if name == "lm_head" else None
        found = self._weights.get(f"{name}.weight", tied)
        if found is None:
            raise PastaError(f"the GGUF file has no {name}.weight")
        return Weights(found.rows(), found.kind, found.shape[-1])
