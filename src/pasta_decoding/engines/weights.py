"""A decoder's weights, by Hugging Face's names: a loaded model's, or those of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pasta_decoding.engines.packed import PACKED, LowRank, Weights
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pasta_decoding.gguf_file import GgufFile

EMBEDDINGS = "model.embed_tokens"


class ModelWeights:
    """The weights of a Hugging Face model, read layer by layer as a decoder asks for them.

    added:             what an adapter adds to linear layers, by their names, if it is not merged.
    form, dtype:       the number format of most weights; the one for keys and values.
    frequency_factors: divisors of the rotary frequencies, if there are any.
    """

    frequency_factors: Tensor | None = None
    _tensors: Mapping[str, Any]

    def __init__(self, model: PreTrainedModel, added: Mapping[str, LowRank] | None = None) -> None:
        self.config: Any = model.config.get_text_config()
        self.added, self._tensors = added or {}, model.state_dict()
        self.dtype, self.form = model.dtype, str(model.dtype).removeprefix("torch.")

    @property
    def is_gemma(self) -> bool:
        return str(self.config.model_type).startswith("gemma")

    def vector(self, name: str) -> Tensor | None:
        """Return a bias or a norm in float32, by its whole name; None if there is none."""
        found = self._tensors.get(name)
        return None if found is None else found[:].float()

    def norm(self, name: str) -> Tensor | None:
        """Return what a norm multiplies by: Gemma's weights need 1 added."""
        found = self.vector(f"{name}.weight")
        return None if found is None else found + float(self.is_gemma)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens in float32, the adapter's rows among them."""
        row_QI: Tensor = self._tensors[f"{EMBEDDINGS}.weight"][list(ids)].float()
        if added := self.added.get(EMBEDDINGS):
            down_RI, up_OR = added
            row_QI += up_OR[list(ids)] @ down_RI
        return row_QI

    def matrix(self, name: str) -> Weights:
        """Return a linear layer's weights."""
        found = Weights.of(self._tensors[f"{name}.weight"]).in_blocks()
        if found.kind in PACKED:
            self.form = "packed"
        return found


class GgufWeights(ModelWeights):
    """The weights of a GGUF file, as it has them.

    They are mapped, not read: embeddings are dequantised row by row as tokens ask for them.
    """

    def __init__(
        self, file: GgufFile, config: Any, added: Mapping[str, LowRank] | None = None
    ) -> None:
        self.config, self.added, self.dtype = config, added or {}, torch.bfloat16
        self._file, self._tensors = file, file.weights
        self.frequency_factors = file.frequency_factors
        kinds = [one.kind.name for one in file.weights.values() if len(one.shape) > 1]
        self.form = max(set(kinds), key=kinds.count)

    def matrix(self, name: str) -> Weights:
        tied = self._tensors.get(f"{EMBEDDINGS}.weight") if name == "lm_head" else None
        found = self._tensors.get(f"{name}.weight", tied)
        if found is None:
            raise PastaError(f"the GGUF file has no {name}.weight")
        self._file.release()
        return Weights(found.rows(), found.kind, found.shape[-1])
