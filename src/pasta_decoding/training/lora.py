"""What is trained and saved: LoRA with the control-token rows in full, or the whole model."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.models.export import write_beside_weights
from pasta_decoding.models.load import eos_ids_of, holds_weights

log = logging.getLogger(__name__)


def add_lora(
    model: Any,
    control: ControlTokens,
    *,
    rank: int,
    seed: int,
    alpha: int | None = None,
    targets: Sequence[str] = (),
    start: str | None = None,
) -> Any:
    """Put LoRA on every linear layer, or on `targets`; make the control-token rows trainable.

    An output layer that is not tied to the embeddings has rows of its own, which are trained as
    well: spare tokens of a vocabulary were never trained, and their rows are often all the same.

    start: an adapter to go on from; its weights and settings replace the others.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(seed)
    if start is not None:
        taken_up = PeftModel.from_pretrained(model, start, is_trainable=True)
        # Its own name for the base is one of a hub, where peft would look whenever it saves.
        taken_up.peft_config["default"].base_model_name_or_path = model.name_or_path
        return taken_up
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layers = ("embed_tokens",) if tied else ("embed_tokens", "lm_head")
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        target_modules=list(targets) or "all-linear",
        trainable_token_indices={layer: sorted(control.ids) for layer in layers},
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        if not targets:
            raise
        raise PastaError(f"lora_targets {', '.join(targets)}: {error}") from error


def set_attention(model: Any, wanted: str, *, on_gpu: bool) -> str:
    """Let `model` compute the attention that is `wanted`, and say which that is.

    wanted: "flex" with block masks, "dense" masks, or "auto": flex on a GPU.
    """
    if wanted == "dense" or (wanted == "auto" and not on_gpu):
        return f"{model.config.get_text_config()._attn_implementation}, with dense masks"
    if not on_gpu:
        raise PastaError("flex attention has no backward pass on a CPU: leave `attention` out")
    model.set_attn_implementation("flex_attention")
    return "flex, with block masks"


def in_4bit(dtype: str) -> Any:
    """Return what lets transformers load a base in NF4 (QLoRA) that computes in `dtype`."""
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        raise PastaError(
            "load_in_4bit needs a GPU and bitsandbytes", hint="pip install bitsandbytes"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )


def recompute_activations(model: Any) -> None:
    """Compute activations again on the way back instead of keeping them."""
    # transformers 5.23 renames it, and warns of the only name that 5.17 knows.
    older, newer = "gradient_checkpointing_enable", "activation_checkpointing_enable"
    getattr(model, newer if hasattr(model, newer) else older)({"use_reentrant": False})


def refuse_other_start(
    start: Path, rank: int, model: Any, tokenizer: Any, control: ControlTokens
) -> None:
    """Refuse to go on from what is no adapter of this model, or one of another rank."""
    if holds_weights(start):
        raise PastaError(
            f"{start} holds a whole model, not an adapter to go on from: give it as --model"
        )
    record = checkpoints.load(start)
    if warning := checkpoints.check_match(record, model, tokenizer):
        log.warning(warning)
    if record.control != control:
        raise PastaError(f"{start} writes its tags with other control tokens than this version")
    path = start / "adapter_config.json"
    try:
        its_rank = int(json.loads(path.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PastaError(f"{path} cannot be read: {error}") from error
    if its_rank != rank:
        raise PastaError(
            f"{start} has LoRA of rank {its_rank}, which stays",
            hint=f"Give --lora-rank {its_rank}.",
        )


def shard_tied_together(model: Any) -> None:
    """Let FSDP keep tied embeddings and output layer in one piece. Call it before training.

    The weight that they share may be sharded once. accelerate 1.15 looks whether they share it,
    but through peft's wrappers it cannot see that, so it must not find them at all.
    """
    if model.config.get_text_config().tie_word_embeddings:
        model.get_input_embeddings = model.get_output_embeddings = lambda: None


def save(
    model: Any,
    tokenizer: Any,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write what was trained: an adapter, or a whole model, as `pasta export --to hf` would.

    weights: the state of the whole model, where `model` itself holds only a shard of it.

    A whole model has become a base of its own, and is described as one.
    """
    if hasattr(model, "peft_config"):
        save_adapter(model, checkpoint, folder, weights=weights)
        return
    if weights is None:
        model.to(torch.bfloat16)
    else:
        weights = {name: one.to(torch.bfloat16) for name, one in weights.items()}
    described = checkpoints.Unloaded(model.config, weights) if weights else model
    base = checkpoints.describe_base(described, checkpoint.base.name)
    eos_ids = eos_ids_of(model.generation_config, tokenizer)
    with written_whole(folder) as partial:
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        write_beside_weights(partial, checkpoint, model.generation_config, eos_ids)
        checkpoints.save(replace(checkpoint, base=base), partial)


def save_adapter(
    model: Any, checkpoint: Checkpoint, folder: Path, *, weights: dict[str, Tensor] | None = None
) -> Path:
    """Write LoRA and control-token rows in bfloat16, whole or not at all."""
    known = weights or dict(model.named_parameters())
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    weights = {name: known[name].detach().to(torch.bfloat16) for name in trained}
    model.peft_config["default"].base_model_name_or_path = checkpoint.base.name
    # The trained rows are saved in any case; asked to find out, peft would look on the hub.
    with written_whole(folder) as partial:
        model.save_pretrained(partial, state_dict=weights, save_embedding_layers=False)
        (partial / "README.md").unlink(missing_ok=True)
        checkpoints.save(checkpoint, partial)
    return folder
