"""An adapter's weights: LoRA and trained token rows, read and merged without peft.

The merged weights are those of peft's `merge_and_unload`, whose import takes longer than a short
answer. Engines that keep an adapter beside the base read it here.
Shapes: O and I outputs and inputs of a linear layer, R rank, T trained tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError, errors_as

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_ROWS = ".token_adapter.trainable_tokens_delta"
# Settings that change the meaning of weights whose names are the same.
_FOREIGN = ("use_dora", "fan_in_fan_out", "layer_replication", "rank_pattern", "alpha_pattern",
            "alora_invocation_tokens", "target_parameters")  # fmt: skip

LayerUpdates = dict[str, tuple["Tensor", "Tensor"]]
"""What is added to the weights of layers, by their names: down_RI and up_OR, for up @ down."""
TokenRows = dict[str, tuple[list[int], "Tensor"]]
"""Tokens, and the rows [T, I] that replace theirs in a table, by the table's name."""


def merge_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder` to the weights of `model`, in place; return it.

    LoRA's product (arXiv 2106.09685, equation 3) is computed in float32. Raises PastaError for an
    adapter that is broken, or does what Pasta's never do.
    """
    import torch

    with _adapter_errors(folder), torch.no_grad():
        low_rank, rows = _read_adapter(folder)
        head, tied = model.get_output_embeddings(), model.get_input_embeddings().weight
        if HEAD in rows and rows[HEAD] is not rows[EMBEDDINGS] and head.weight is tied:
            # It was trained on a copy whose head has weights of its own.
            head.weight = torch.nn.Parameter(tied.clone())
            model.config.tie_word_embeddings = False
        for layer, (down_RI, up_OR) in low_rank.items():
            weight = model.get_submodule(layer).weight.data
            _check_shape(layer, (down_RI, up_OR), weight)
            weight += up_OR @ down_RI.float()
        for layer, (tokens, row_TI) in rows.items():
            table = model.get_submodule(layer).weight
            table.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table))
    return model


def read_layer_updates(weights: Mapping[str, Any], folder: Path) -> LayerUpdates:
    """Return what the adapter adds to the layers of a model with these weights, by their names.

    weights: tensors, or weights of a GGUF file; without `lm_head` the head is tied.

    Trained token rows have this form as well: one rank for each token. Raises PastaError as
    `merge_adapter` does.
    """
    import torch
    from torch.nn import functional

    with _adapter_errors(folder), torch.no_grad():
        added, rows = _read_adapter(folder)
        tied = weights[f"{EMBEDDINGS}.weight"]
        for layer, (tokens, row_TI) in rows.items():
            table = weights.get(f"{layer}.weight", tied)
            up_OT = functional.one_hot(torch.tensor(tokens), table.shape[0]).T.float()
            if row_TI.shape != (replaced_TI := table[tokens].float()).shape:
                raise ValueError(f"{layer} has another shape")
            added[layer] = (row_TI.float() - replaced_TI, up_OT)
        for layer, pair in added.items():
            _check_shape(layer, pair, weights.get(f"{layer}.weight", tied))
    return added


def _check_shape(layer: str, pair: tuple[Tensor, Tensor], weight: Any) -> None:
    down_RI, up_OR = pair
    if (len(up_OR), down_RI.shape[1]) != tuple(weight.shape):
        raise ValueError(f"{layer} has another shape")


def _read_adapter(folder: Path) -> tuple[LayerUpdates, TokenRows]:
    """Read an adapter of the kind that Pasta trains; LoRA's scale is in `up`."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    refuse_foreign(settings, f"the adapter in {folder}")
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    found = load_file(folder / "adapter_model.safetensors")
    weights = {name.removeprefix("base_model.model."): one for name, one in found.items()}
    low_rank, rows = {}, {}
    for name in sorted(weights):
        if not (weights[name].float().sum() * scale).isfinite():
            raise ValueError(f"{name} has numbers that are not finite")
        if name.endswith(_DOWN):
            layer = name.removesuffix(_DOWN)
            low_rank[layer] = down_RI, up_OR = weights[name], weights[layer + _UP].float() * scale
            if (len(down_RI), up_OR.shape[1]) != (rank, rank):
                raise ValueError(f"{layer} has another rank than {rank}")
        elif name.endswith(_ROWS):
            layer = name.removesuffix(_ROWS)
            tokens = settings["trainable_token_indices"][layer.rpartition(".")[2]]
            rows[layer] = (tokens, weights[name])
        elif not name.endswith(_UP):
            raise ValueError(f"{name} has no place")
    if EMBEDDINGS in rows:  # trained on a copy of the base whose head is tied
        rows.setdefault(HEAD, rows[EMBEDDINGS])
    return low_rank, rows


def refuse_foreign(settings: Mapping[str, Any], what: str) -> None:
    """Raise PastaError for LoRA whose settings change what its weights mean."""
    if foreign := [name for name in _FOREIGN if settings.get(name)]:
        raise PastaError(f"{what} uses {', '.join(foreign)}, which Pasta does not merge")


def _adapter_errors(folder: Path) -> AbstractContextManager[None]:
    from safetensors import SafetensorError

    kinds = OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError
    said = f"the adapter in {folder} cannot be loaded"
    return errors_as(said, *kinds, ArithmeticError, SafetensorError)
