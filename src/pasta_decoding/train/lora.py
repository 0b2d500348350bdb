"""LoRA on a base model, with the control-token rows trained in full."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.models import binding as bindings
from pasta_decoding.models.binding import Binding, Checkpoint


def add_lora(
    model: Any, binding: Binding, *, rank: int, seed: int, start: str | None = None
) -> Any:
    """Put LoRA on every linear layer, and make the control-token rows trainable.

    With `start`, that adapter's are taken up again.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(seed)
    if start is not None:
        taken_up = PeftModel.from_pretrained(model, start, is_trainable=True)
        # Its own name for the base is one of a hub, where peft would look whenever it saves.
        taken_up.peft_config["default"].base_model_name_or_path = model.name_or_path
        return taken_up
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        trainable_token_indices={"embed_tokens": sorted(binding.ids)},
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


def save_adapter(model: Any, checkpoint: Checkpoint, folder: Path) -> Path:
    """Write LoRA and control-token rows in bfloat16, whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = checkpoint.base.name
    # The trained rows are saved in any case; asked to find out, peft would look on the hub.
    model.save_pretrained(partial, save_embedding_layers=False)
    (partial / "README.md").unlink(missing_ok=True)
    bindings.save(checkpoint, partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder
