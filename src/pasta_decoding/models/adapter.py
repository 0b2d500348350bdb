"""An adapter's weights: LoRA and trained token rows, read and merged without peft.

The merged weights equal those of peft's `merge_and_unload`. To import peft takes longer than a
short answer. Engines that do not merge an adapter read it here as well.
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

EMBEDDINGS = "model.embed_tokens"
HEAD = "lm_head"
_DOWN = ".lora_A.weight"
_UP = ".lora_B.weight"
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
_FOREIGN_SETTINGS = (
    "use_dora",
    "fan_in_fan_out",
    "layer_replication",
    "rank_pattern",
    "alpha_pattern",
    "alora_invocation_tokens",
    "target_parameters",
)
"""Settings of peft that change what weights of the same names mean."""

LayerUpdates = dict[str, tuple["Tensor", "Tensor"]]
"""By layer: down_RI and up_OR, whose product up @ down is added to the layer's weight."""
TokenRows = dict[str, tuple[list[int], "Tensor"]]
"""By table (embeddings or head): trained tokens, and the rows [T, I] that replace theirs."""


def merge_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder` to the weights of `model`, in place; return the model.

    LoRA's product (arXiv 2106.09685, equation 3) is computed in float32. Raises PastaError for an
    adapter that is broken, or of a kind that Pasta never trains.
    """
    import torch

    with _adapter_errors(folder), torch.no_grad():
        low_rank, token_rows = _read_adapter(folder)
        head = model.get_output_embeddings()
        embeddings = model.get_input_embeddings().weight
        has_head_rows = HEAD in token_rows and token_rows[HEAD] is not token_rows[EMBEDDINGS]
        if has_head_rows and head.weight is embeddings:
            # The adapter was trained on a copy whose head has weights of its own.
            head.weight = torch.nn.Parameter(embeddings.clone())
            model.config.tie_word_embeddings = False
        for layer, (down_RI, up_OR) in low_rank.items():
            weight = model.get_submodule(layer).weight.data
            _check_shape(layer, (down_RI, up_OR), weight)
            weight += up_OR @ down_RI.float()
        for layer, (tokens, row_TI) in token_rows.items():
            table = model.get_submodule(layer).weight
            table.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table))
    return model


def read_layer_updates(weights: Mapping[str, Any], folder: Path) -> LayerUpdates:
    """Return the adapter's updates for the layers of a model with these weights.

    weights: tensors, or weights of a GGUF file, by name. Without `lm_head` the head is tied.

    Trained token rows become updates as well, with a rank for each token. Raises PastaError as
    `merge_adapter` does.
    """
    import torch
    from torch.nn import functional

    with _adapter_errors(folder), torch.no_grad():
        updates, token_rows = _read_adapter(folder)
        embeddings = weights[f"{EMBEDDINGS}.weight"]
        for layer, (tokens, row_TI) in token_rows.items():
            table = weights.get(f"{layer}.weight", embeddings)
            replaced_TI = table[tokens].float()
            if row_TI.shape != replaced_TI.shape:
                raise ValueError(f"{layer} has another shape")
            up_OT = functional.one_hot(torch.tensor(tokens), table.shape[0]).T.float()
            updates[layer] = (row_TI.float() - replaced_TI, up_OT)
        for layer, update in updates.items():
            _check_shape(layer, update, weights.get(f"{layer}.weight", embeddings))
    return updates


def _check_shape(layer: str, update: tuple[Tensor, Tensor], weight: Any) -> None:
    down_RI, up_OR = update
    if (len(up_OR), down_RI.shape[1]) != tuple(weight.shape):
        raise ValueError(f"{layer} has another shape")


def _read_adapter(folder: Path) -> tuple[LayerUpdates, TokenRows]:
    """Read an adapter of the kind that Pasta trains. `up` is multiplied by LoRA's scale."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    refuse_foreign(settings, f"the adapter in {folder}")
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    low_rank: LayerUpdates = {}
    token_rows: TokenRows = {}
    for name in sorted(weights):
        if not (weights[name].float().sum() * scale).isfinite():
            raise ValueError(f"{name} has numbers that are not finite")
        if name.endswith(_DOWN):
            layer = name.removesuffix(_DOWN)
            down_RI = weights[name]
            up_OR = weights[layer + _UP].float() * scale
            if (len(down_RI), up_OR.shape[1]) != (rank, rank):
                raise ValueError(f"{layer} has another rank than {rank}")
            low_rank[layer] = (down_RI, up_OR)
        elif name.endswith(_TOKEN_ROWS):
            layer = name.removesuffix(_TOKEN_ROWS)
            tokens = settings["trainable_token_indices"][layer.rpartition(".")[2]]
            token_rows[layer] = (tokens, weights[name])
        elif not name.endswith(_UP):
            raise ValueError(f"{name} has no place")
    if EMBEDDINGS in token_rows:  # trained on a base whose head is tied to them
        token_rows.setdefault(HEAD, token_rows[EMBEDDINGS])
    return low_rank, token_rows


def add_to_head(source: Path, target: Path, added: Mapping[int, Tensor]) -> None:
    """Write the adapter of the folder `source` to `target` with vectors added to rows of its head.

    Of a base whose head is tied to its embeddings, the adapter gets rows of its own for the head;
    those of the embeddings stay. The rows are written in float32.

    added: by trained token, a vector [I].
    """
    from safetensors.torch import load_file, save_file

    with _adapter_errors(source):
        settings = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(source / "adapter_model.safetensors")
        name_by_table = {
            name.removesuffix(_TOKEN_ROWS).rpartition(".")[2]: name
            for name in tensors
            if name.endswith(_TOKEN_ROWS)
        }
        tokens_by_table = settings["trainable_token_indices"]
        embeddings = EMBEDDINGS.rpartition(".")[2]
        tokens_by_table.setdefault(HEAD, tokens_by_table[embeddings])
        rows_TI = tensors[name_by_table.get(HEAD, name_by_table[embeddings])].float().clone()
        for token, vector_I in added.items():
            rows_TI[tokens_by_table[HEAD].index(token)] += vector_I
        tensors[f"base_model.model.{HEAD}{_TOKEN_ROWS}"] = rows_TI
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def refuse_foreign(settings: Mapping[str, Any], what: str) -> None:
    """Raise PastaError for settings of LoRA under which its weights mean something else.

    what: the subject of the message.
    """
    foreign = [name for name in _FOREIGN_SETTINGS if settings.get(name)]
    if foreign:
        raise PastaError(f"{what} uses {', '.join(foreign)}, which Pasta does not merge")


def _adapter_errors(folder: Path) -> AbstractContextManager[None]:
    """Turn the errors of reading and merging an adapter into a PastaError that names its folder."""
    from safetensors import SafetensorError

    return errors_as(
        f"the adapter in {folder} cannot be loaded",
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    )
