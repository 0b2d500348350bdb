"""LoRA and trained token rows, added to the weights they were trained on.

The arithmetic of peft's `merge_and_unload`, to the bit, without peft: decoding needs no more.
Shapes: O and I outputs and inputs of a linear layer, R rank, T trained tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_LORA = (".lora_A.weight", ".lora_B.weight")
_TOKENS = ".token_adapter.trainable_tokens_delta"
# What else an adapter may have; each changes what its weights mean.
_FOREIGN = (
    "use_dora", "use_bdlora", "use_qalora", "lora_bias", "fan_in_fan_out", "layer_replication",
    "modules_to_save", "rank_pattern", "alpha_pattern", "alora_invocation_tokens",
    "target_parameters", "megatron_config", "arrow_config", "kasa_config",
)  # fmt: skip


def merge_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder` to the weights of `model`, in place; return it.

    Raises PastaError for an adapter that is broken, or does what Pasta's never do.
    """
    import torch

    with _reading(folder), torch.no_grad():
        modules, (weights, settings) = dict(model.named_modules()), _read(folder)
        for layer, (down_RI, up_OR) in _low_rank(weights):
            _add_lora(modules[layer], down_RI, up_OR, _scale(settings))
        for name, layer, tokens in _trained_rows(weights, settings):
            _replace_rows(modules[layer], tokens, weights[name])
    return model


def read_added(model: Any, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the adapter adds to the linear layers of `model`, by their names.

    Each is down_RI and up_OR, whose product up @ down is to be added to the layer's weight. What
    trained tokens change in the output layer is of such a form, too: a rank for each of them.
    Raises PastaError as `merge_adapter` does.
    """
    import torch

    with _reading(folder), torch.no_grad():
        weights, settings = _read(folder)
        scale = _scale(settings)
        added = {
            layer: (down_RI, up_OR.float() * scale)
            for layer, (down_RI, up_OR) in _low_rank(weights)
        }
        names = {module: name for name, module in model.named_modules()}
        head = model.get_output_embeddings()
        for name, tokens in output_rows(model, weights, settings):
            up_OT = torch.zeros(len(head.weight), len(tokens))
            up_OT[tokens, range(len(tokens))] = 1.0
            added[names[head]] = (weights[name].float() - head.weight[tokens].float(), up_OT)
        for layer, (down_RI, up_OR) in added.items():
            if (len(up_OR), down_RI.shape[1]) != tuple(model.get_submodule(layer).weight.shape):
                raise ValueError(f"{layer} has another shape")
    return added


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except PastaError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
            SafetensorError) as error:  # fmt: skip
        message = f"the adapter in {folder} cannot be loaded: {error}"
        raise PastaError(message, hint="Train it again, or fetch it again.") from error


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and settings of an adapter that is of the kind that Pasta trains."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    foreign = [name for name in _FOREIGN if settings.get(name)]
    if settings["peft_type"] != "LORA" or settings.get("bias", "none") != "none" or foreign:
        said = ", ".join(foreign) or f"{settings['peft_type']} with bias {settings.get('bias')!r}"
        raise PastaError(
            f"the adapter is of a kind that Pasta does not merge ({said})",
            hint="Merge it with peft, and give the merged folder.",
        )
    found = load_file(folder / "adapter_model.safetensors")
    weights = {name.removeprefix(_PREFIX): weight for name, weight in found.items()}
    for name in weights:
        if not name.endswith((*_LORA, _TOKENS)):
            raise KeyError(f"{name} has no place")
    return weights, settings


def _scale(settings: Mapping[str, Any]) -> float:
    rank = settings["r"]
    return float(settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _low_rank(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield each layer that LoRA changes, with its down_RI and up_OR."""
    for name in sorted(weights):
        if name.endswith(_LORA[0]):
            layer = name.removesuffix(_LORA[0])
            yield layer, (weights[name], weights[layer + _LORA[1]])


def output_rows(
    model: Any, tensors: Iterable[str], settings: Mapping[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """Yield which of an adapter's tensors are rows of the output layer, and of which tokens."""
    head = model.get_output_embeddings().weight
    for name, layer, tokens in _trained_rows(tensors, settings):
        if model.get_submodule(layer).weight is head:
            yield name, tokens


def _trained_rows(
    tensors: Iterable[str], settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[int]]]:
    """Yield which of an adapter's tensors are rows of trained tokens, the layer, and the tokens."""
    for name in sorted(tensors):
        if name.endswith(_TOKENS):
            layer = name.removeprefix(_PREFIX).removesuffix(_TOKENS)
            yield name, layer, settings["trainable_token_indices"][layer.rpartition(".")[2]]


def _add_lora(linear: Any, down_RI: Tensor, up_OR: Tensor, scale: float) -> None:
    """Add what LoRA does to a layer (arXiv 2106.09685, equation 3), computed in float32."""
    linear.weight.data += (up_OR.float() @ down_RI.float()) * scale


def _replace_rows(table: Any, tokens: list[int], row_TI: Tensor) -> None:
    """Put the trained rows of the control tokens in place of theirs; a tied head shares them."""
    import torch

    table.weight.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table.weight))
