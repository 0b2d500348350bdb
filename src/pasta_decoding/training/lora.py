"""What is trained and saved: LoRA with the control-token rows in full, or the whole model."""

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import written_whole
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.adapter import refuse_foreign
from pasta_decoding.models.checkpoint import write_checkpoint
from pasta_decoding.models.export import write_beside_weights
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.training.config import SftConfig


def add_lora(model: Any, control: ControlTokens, config: SftConfig) -> Any:
    """Put LoRA on every linear layer, or on those named; make the control-token rows trainable.

    In a mixture of experts, whose weights are one tensor each, it goes on attention alone.
    An output layer that is not tied to the embeddings has rows of its own, which are trained as
    well: spare tokens of a vocabulary were never trained, and their rows are often all the same.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    layer_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if wrong := [one for one in config.lora_targets if one.rpartition(".")[2] not in layer_names]:
        raise PastaError(f"{model.config.model_type} has no layers {wrong[0]!r} for LoRA")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layers = ("embed_tokens",) if tied else ("embed_tokens", "lm_head")
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=list(config.lora_targets) or _all_layers(model),
        trainable_token_indices={layer: sorted(control.ids) for layer in layers},
        task_type="CAUSAL_LM",
    )
    with errors_as(f"{model.config.model_type} cannot be trained with LoRA", TypeError, ValueError):
        found = get_peft_model(model, settings)
    refuse_foreign(vars(settings), f"LoRA on these layers of {model.config.model_type}")
    settings.base_model_name_or_path = ""  # else peft saves whole tables that have grown
    return found


def _all_layers(model: Any) -> list[str] | str:
    if all(one.ndim < 3 for one in model.parameters()):
        return "all-linear"
    logging.getLogger(__name__).info("LoRA is put on attention: experts stay as they are")
    layers = (name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in layers if "attn" in name})


def take_up(model: Any, adapter: Path, *, seed: int, rank: int | None = None) -> Any:
    """Go on from an adapter: its weights are trainable. Raises PastaError for another rank."""
    from peft import PeftModel

    torch.manual_seed(seed)
    found = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    settings: Any = found.peft_config["default"]
    refuse_foreign(vars(settings), f"the adapter in {adapter}")
    if rank not in (None, settings.r):
        raise PastaError(f"{adapter} has LoRA of rank {settings.r}: give --lora-rank {settings.r}")
    # Its own name for the base is one of a hub, where peft would look whenever it saves.
    settings.base_model_name_or_path = ""
    return found


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


def shard_tied_together(model: Any) -> None:
    """Let FSDP keep tied embeddings and output layer in one piece. Call it before training.

    The weight that they share may be sharded once. accelerate 1.15 looks whether they share it,
    but through peft's wrappers it cannot see that, so it must not find them at all.
    """
    if model.config.get_text_config().tie_word_embeddings:
        model.get_input_embeddings = model.get_output_embeddings = lambda: None


def save(loaded: LoadedModel, folder: Path, *, weights: dict[str, Tensor] | None = None) -> Path:
    """Write what was trained, whole or not at all, in bfloat16; return the folder.

    It is LoRA and control-token rows, or a whole model as `pasta export --to hf` would write it:
    that has become a base of its own, and is described as one.

    weights: the state of the whole model, where `model` itself holds only a shard of it.
    """
    model, checkpoint = loaded.model, loaded.checkpoint
    with written_whole(folder) as partial:
        if hasattr(model, "peft_config"):
            known = weights or dict(model.named_parameters())
            trained = [name for name, one in model.named_parameters() if one.requires_grad]
            state = {name: known[name].detach().to(torch.bfloat16) for name in trained}
            model.peft_config["default"].base_model_name_or_path = checkpoint.base.name
            # The trained rows are saved in any case; asked to find out, peft looks on the hub.
            model.save_pretrained(partial, state_dict=state, save_embedding_layers=False)
            (partial / "README.md").unlink(missing_ok=True)
            write_checkpoint(checkpoint, partial)
        else:
            if weights is None:
                described = model.to(torch.bfloat16)
            else:
                weights = {name: one.to(torch.bfloat16) for name, one in weights.items()}
                described = checkpoints.ModelStub(model.config, weights)
            base = checkpoints.describe_base(described, checkpoint.base.name)
            model.save_pretrained(partial, state_dict=weights)
            own = replace(loaded, checkpoint=replace(checkpoint, base=base))
            write_beside_weights(own, partial)
    return folder
