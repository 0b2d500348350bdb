"""An adapter's weights: LoRA and trained token rows, read and merged without peft.

The merged weights are those of peft's `merge_and_unload` to the bit; peft's import takes longer
than a short answer. Engines that keep an adapter beside the base read it here.
Shapes: O and I outputs and inputs of a linear layer, R rank, T trained tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
_LORA = (".lora_A.weight", ".lora_B.weight")
_TOKENS = ".token_adapter.trainable_tokens_delta"
# Settings that change the meaning of an adapter's weights.
_FOREIGN = (
    "use_dora", "use_bdlora", "use_qalora", "lora_bias", "fan_in_fan_out", "layer_replication",
    "modules_to_save", "rank_pattern", "alpha_pattern", "alora_invocation_tokens",
    "target_parameters", "megatron_config", "arrow_config", "kasa_config",
)  # fmt: skip


Added = dict[str, tuple["Tensor", "Tensor"]]
"""What is added to the weights of layers, by their names: down_RI and up_OR, for up @ down."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What an adapter changes, by the names of layers.

    low_rank: down_RI and up_OR; `scale` times up @ down is added to the layer's weight.
    rows:     tokens, and the rows [T, I] that replace theirs in a table.
    """

    low_rank: dict[str, tuple[Tensor, Tensor]]
    rows: dict[str, tuple[list[int], Tensor]]
    scale: float


def read_adapter(folder: Path) -> AdapterWeights:
    """Read an adapter of the kind that Pasta trains. Raises PastaError for another, or no file."""
    with _adapter_errors(folder):
        from safetensors.torch import load_file

        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        foreign = [name for name in _FOREIGN if settings.get(name)]
        if settings["peft_type"] != "LORA" or settings.get("bias", "none") != "none" or foreign:
            said = ", ".join(foreign) or f"{settings['peft_type']}, bias {settings.get('bias')!r}"
            raise PastaError(
                f"the adapter is of a kind that Pasta does not merge ({said}); merge it with peft"
            )
        found = load_file(folder / "adapter_model.safetensors")
        weights = {name.removeprefix("base_model.model."): one for name, one in found.items()}
        for name in weights:
            if not name.endswith((*_LORA, _TOKENS)):
                raise KeyError(f"{name} has no place")
        layers = [n.removesuffix(_LORA[0]) for n in sorted(weights) if n.endswith(_LORA[0])]
        tables = [n.removesuffix(_TOKENS) for n in sorted(weights) if n.endswith(_TOKENS)]
        tokens = settings.get("trainable_token_indices") or {}
        rows = {n: (tokens[n.rpartition(".")[2]], weights[n + _TOKENS]) for n in tables}
        if EMBEDDINGS in rows:  # trained on a copy of the base whose head is tied
            rows.setdefault(HEAD, rows[EMBEDDINGS])
        low_rank = {n: (weights[n + _LORA[0]], weights[n + _LORA[1]]) for n in layers}
        rank = math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"]
        return AdapterWeights(low_rank, rows, float(settings["lora_alpha"] / rank))


def merge_adapter(model: Any, folder: Path, *, rows_only: bool = False) -> Any:
    """Add the adapter in `folder` to the weights of `model`, in place; return it.

    rows_only: add its trained token rows, and leave the linear layers as they are.

    LoRA's product (arXiv 2106.09685, equation 3) is computed in float32. Raises PastaError for an
    adapter that is broken, or does what Pasta's never do.
    """
    import torch

    adapter = read_adapter(folder)
    with _adapter_errors(folder), torch.no_grad():
        for layer, (down_RI, up_OR) in () if rows_only else adapter.low_rank.items():
            weight = model.get_submodule(layer).weight.data
            weight += (up_OR.float() @ down_RI.float()) * adapter.scale
        for layer, (tokens, row_TI) in adapter.rows.items():
            table = model.get_submodule(layer).weight
            table.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table))
    return model


def read_added(weights: Mapping[str, Any], folder: Path) -> Added:
    """Return what the adapter adds to the layers of a model with these weights, by their names.

    weights: tensors, or weights of a GGUF file; without `lm_head` the head is tied.

    Trained token rows have this form as well: one rank for each token. Raises PastaError as
    `merge_adapter` does.
    """
    import torch

    adapter = read_adapter(folder)
    with _adapter_errors(folder), torch.no_grad():
        added = {
            layer: (down_RI, up_OR.float() * adapter.scale)
            for layer, (down_RI, up_OR) in adapter.low_rank.items()
        }
        tied = weights[f"{EMBEDDINGS}.weight"]
        for layer, (tokens, row_TI) in adapter.rows.items():
            table = weights.get(f"{layer}.weight", tied)
            up_OT = torch.zeros(table.shape[0], len(tokens))
            up_OT[tokens, range(len(tokens))] = 1.0
            added[layer] = (row_TI.float() - table[tokens].float(), up_OT)
        for layer, (down_RI, up_OR) in added.items():
            weight = weights.get(f"{layer}.weight", tied)
            if (len(up_OR), down_RI.shape[1]) != tuple(weight.shape):
                raise ValueError(f"{layer} has another shape")
    return added


@contextmanager
def _adapter_errors(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except PastaError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
            SafetensorError) as error:  # fmt: skip
        raise PastaError(f"the adapter in {folder} cannot be loaded: {error}") from error
