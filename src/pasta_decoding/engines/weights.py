"""A decoder's weights, by Hugging Face's names: a loaded model's, or those of a GGUF file.

Shapes: Q tokens, O outputs and I inputs of a linear layer, R rank of an adapter, N bytes of a row,
P pairs of a head's numbers that rotate together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gguf import GGMLQuantizationType as GgmlType
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
# Gemma also has norms after attention and MLP.
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
    if weight_OI.dtype == torch.bfloat16:
        ggml_type = GgmlType.BF16
    else:
        ggml_type = GgmlType.F32
        weight_OI = weight_OI.float()
    bytes_ON = weight_OI.detach().contiguous().view(torch.uint8).numpy()
    return GgufTensor(bytes_ON, ggml_type, tuple(weight_OI.shape))


class ModelWeights:
    """The weights of a decoder, read layer by layer as an engine asks for them.

    Those of a file are mapped, not read: embeddings are dequantised row by row.

    model: Hugging Face's, or a stand-in with its config and the weights of `file`.
    added: what an adapter adds to linear layers and embeddings, by their modules' names; empty if
           there is no adapter or it is merged.
    kinds: the kind of attention of each layer, as transformers names it.
    form:  the number format of most matrices.

    frequency_factors: of a file, what divides the frequencies of rotary positions, [P].
    """

    def __init__(
        self, model: Any, added: Mapping[str, LowRank] | None = None, file: GgufFile | None = None
    ) -> None:
        config = model.config.get_text_config()
        self.config = config
        self.added = added or {}
        self._file = file
        self._tensors: dict[str, Any] = dict(model.named_parameters())
        self.is_gemma = str(config.model_type).startswith("gemma")
        heads = config.num_attention_heads
        self.head_width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        query_scalar = getattr(config, "query_pre_attn_scalar", None) or self.head_width
        self.scaling = float(query_scalar) ** -0.5
        every_layer = list(attention_windows(config)) * config.num_hidden_layers
        self.kinds: list[str] = getattr(config, "layer_types", None) or every_layer
        self.frequency_factors: Tensor | None = None
        if file is None:
            self.form = str(model.dtype).removeprefix("torch.")
        else:
            matrices = [tensor for tensor in self._tensors.values() if len(tensor.shape) > 1]
            forms = [matrix.kind.name for matrix in matrices]
            self.form = max(set(forms), key=forms.count)
            self.frequency_factors = file.frequency_factors

    def layers(self) -> Iterator[Layer]:
        norm_modules = _NORMS | (_GEMMA_NORMS if self.is_gemma else {})
        for number in range(len(self.kinds)):
            prefix = f"model.layers.{number}"
            linear = {
                name: [self.linear(f"{prefix}.{module}") for module in modules]
                for name, modules in _LINEAR.items()
            }
            norms = {}
            for name, module in norm_modules.items():
                norm_I = self.norm(f"{prefix}.{module}")
                if norm_I is not None:
                    norms[name] = norm_I
            yield Layer(linear, norms)

    def linear(self, module: str) -> Linear:
        """Return a linear layer; `lm_head` may have its weights from the embeddings."""
        is_tied = module == "lm_head" and "lm_head.weight" not in self._tensors
        tensor = self._tensors[f"{EMBEDDINGS if is_tied else module}.weight"]
        if self._file is not None:
            self._file.release()  # what the layers before have read
        weight = tensor if isinstance(tensor, GgufTensor) else stored(tensor)
        return Linear(weight, self.added.get(module), self._vector(f"{module}.bias"))

    def norm(self, module: str) -> Tensor | None:
        """Return what a norm multiplies by: Gemma's weights need 1 added. None: there is none."""
        weight_I = self._vector(f"{module}.weight")
        if weight_I is None:
            return None
        return weight_I + float(self.is_gemma)

    def _vector(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor[:].float()

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens in float32, the adapter's rows among them."""
        row_QI: Tensor = self._tensors[f"{EMBEDDINGS}.weight"][list(ids)].float()
        if low_rank := self.added.get(EMBEDDINGS):
            down_RI, up_OR = low_rank
            row_QI += up_OR[list(ids)] @ down_RI
        return row_QI * (self.config.hidden_size**0.5 if self.is_gemma else 1.0)
