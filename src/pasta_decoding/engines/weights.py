"""A decoder's weights, by Hugging Face's names: a loaded model's, or those of a GGUF file.

Shapes: Q tokens, O outputs and I inputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.gguf_file import GgufFile, GgufTensor

EMBEDDINGS = "model.embed_tokens"
# Linear layers that read the same inputs are computed together.
_LINEAR = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {
    "input_norm": "input_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp_input_norm": "post_attention_layernorm",
}
# Gemma also has norms behind attention and MLP.
_GEMMA_NORMS = {
    "attention_norm": "post_attention_layernorm",
    "mlp_input_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}

LowRank = tuple[Tensor, Tensor]
"""What an adapter adds to a layer: down_RI and up_OR, whose product up @ down is added."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its weights, an adapter's low-rank addition, its bias."""

    weight: GgufTensor
    added: LowRank | None = None
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a layer, by their names in decoder.h. A family may lack some norms."""

    linear: Mapping[str, Sequence[Linear]]
    norms: Mapping[str, Tensor]


def stored(weight_OI: Tensor) -> GgufTensor:
    """Return a tensor as a file has it, in bfloat16 or float32."""
    kind = Kind.BF16 if weight_OI.dtype == torch.bfloat16 else Kind.F32
    numbers_OI = weight_OI if kind is Kind.BF16 else weight_OI.float()
    bytes_ON = numbers_OI.detach().contiguous().view(torch.uint8).numpy()
    return GgufTensor(bytes_ON, kind, tuple(weight_OI.shape))


class ModelWeights:
    """The weights of a decoder, read layer by layer as an engine asks for them.

    Those of a file are mapped, not read: embeddings are dequantised row by row.

    model: Hugging Face's, or a stand-in with its config and the weights of `file`.
    added: what an adapter adds to linear layers, by their names, if it is not merged.
    kinds: of attention, for each layer.
    form:  the number format of most weights.
    """

    def __init__(
        self, model: Any, added: Mapping[str, LowRank] | None = None, file: GgufFile | None = None
    ) -> None:
        self.config = config = model.config.get_text_config()
        self.added, self._file = added or {}, file
        self._tensors: dict[str, Any] = dict(model.named_parameters())
        self.is_gemma = str(config.model_type).startswith("gemma")
        heads = config.num_attention_heads
        self.head_width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        scalar = getattr(config, "query_pre_attn_scalar", None) or self.head_width
        self.scaling = float(scalar) ** -0.5
        same = list(attention_windows(config)) * config.num_hidden_layers
        self.kinds: list[str] = getattr(config, "layer_types", None) or same
        if file is None:
            self.form, self.frequency_factors = str(model.dtype).removeprefix("torch."), None
        else:
            kinds = [one.kind.name for one in self._tensors.values() if len(one.shape) > 1]
            self.form = max(set(kinds), key=kinds.count)
            self.frequency_factors = file.frequency_factors

    def layers(self) -> Iterator[Layer]:
        names = _NORMS | (_GEMMA_NORMS if self.is_gemma else {})
        for number in range(len(self.kinds)):
            at = f"model.layers.{number}"
            norms = {name: self.norm(f"{at}.{own}") for name, own in names.items()}
            yield Layer(
                {name: [self.linear(f"{at}.{one}") for one in _LINEAR[name]] for name in _LINEAR},
                {name: norm_I for name, norm_I in norms.items() if norm_I is not None},
            )

    def linear(self, name: str) -> Linear:
        is_tied = name == "lm_head" and "lm_head.weight" not in self._tensors
        found = self._tensors[f"{EMBEDDINGS if is_tied else name}.weight"]
        if self._file is not None:
            self._file.release()
        weight = found if isinstance(found, GgufTensor) else stored(found)
        return Linear(weight, self.added.get(name), self._vector(f"{name}.bias"))

    def norm(self, name: str) -> Tensor | None:
        """Return what a norm multiplies by: Gemma's weights need 1 added. None: there is none."""
        found = self._vector(f"{name}.weight")
        return None if found is None else found + float(self.is_gemma)

    def _vector(self, name: str) -> Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found[:].float()

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens in float32, the adapter's rows among them."""
        row_QI: Tensor = self._tensors[f"{EMBEDDINGS}.weight"][list(ids)].float()
        if added := self.added.get(EMBEDDINGS):
            down_RI, up_OR = added
            row_QI += up_OR[list(ids)] @ down_RI
        return row_QI * (self.config.hidden_size**0.5 if self.is_gemma else 1.0)
