"""LoRA and trained token rows, added to the weights they were trained on.

The arithmetic of peft's `merge_and_unload`, to the bit, without peft: decoding needs no more.
Shapes: O and I outputs and inputs of a linear layer, R rank, T trained tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
    from safetensors import SafetensorError

    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with torch.no_grad():
            _merge(dict(model.named_modules()), _weights(folder), settings)
    except PastaError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
            SafetensorError) as error:  # fmt: skip
        message = f"the adapter in {folder} cannot be loaded: {error}"
        raise PastaError(message, hint="Train it again, or fetch it again.") from error
    return model


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix(_PREFIX): weight for name, weight in found.items()}


def _merge(
    modules: Mapping[str, Any], weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    foreign = [name for name in _FOREIGN if settings.get(name)]
    if settings["peft_type"] != "LORA" or settings.get("bias", "none") != "none" or foreign:
        said = ", ".join(foreign) or f"{settings['peft_type']} with bias {settings.get('bias')!r}"
        raise PastaError(
            f"the adapter is of a kind that Pasta does not merge ({said})",
            hint="Merge it with peft, and give the merged folder.",
        )
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    for name in sorted(weights):
        if name.endswith(_LORA[0]):
            layer = name.removesuffix(_LORA[0])
            _add_lora(modules[layer], weights[name], weights[layer + _LORA[1]], scale)
        elif name.endswith(_TOKENS):
            layer = name.removesuffix(_TOKENS)
            tokens = settings["trainable_token_indices"][layer.rpartition(".")[2]]
            _replace_rows(modules[layer], tokens, weights[name])
        elif not name.endswith(_LORA[1]):
            raise KeyError(f"{name} has no place")


def _add_lora(linear: Any, down_RI: Tensor, up_OR: Tensor, scale: float) -> None:
    """Add what LoRA does to a layer (arXiv 2106.09685, equation 3), computed in float32."""
    linear.weight.data += (up_OR.float() @ down_RI.float()) * scale


def _replace_rows(table: Any, tokens: list[int], row_TI: Tensor) -> None:
    """Put the trained rows of the control tokens in place of theirs; a tied head shares them."""
    import torch

    table.weight.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table.weight))
