"""The weights that are trained and saved: LoRA and the control-token rows, or the whole model."""

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
from pasta_decoding.models.checkpoint import read_checkpoint, write_checkpoint
from pasta_decoding.models.export import write_beside_weights
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.training.config import SftConfig


def add_lora(model: Any, control: ControlTokens, config: SftConfig) -> Any:
    """Put LoRA on `config.lora_targets`, by default on all linear layers; train control-token rows.

    In a mixture of experts, LoRA goes on attention alone: the experts of a layer are one tensor and
    no linear layers. If the output layer is not tied to the embeddings, its control-token rows are
    trained as well: spare tokens of a vocabulary were never trained, and their rows are often all
    the same.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    layer_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for target in config.lora_targets:
        if target.rpartition(".")[2] not in layer_names:
            raise PastaError(f"{model.config.model_type} has no layers {target!r} for LoRA")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    token_layers = ("embed_tokens",) if tied else ("embed_tokens", "lm_head")
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=list(config.lora_targets) or _all_layers(model),
        trainable_token_indices={layer: sorted(control.ids) for layer in token_layers},
        task_type="CAUSAL_LM",
    )
    with errors_as(f"{model.config.model_type} cannot be trained with LoRA", TypeError, ValueError):
        peft_model = get_peft_model(model, settings)
    refuse_foreign(vars(settings), f"LoRA on these layers of {model.config.model_type}")
    # With a name there, peft would save the full embedding tables if tokens were added to them.
    settings.base_model_name_or_path = ""
    return peft_model


def _all_layers(model: Any) -> list[str] | str:
    """Return peft's `target_modules`: all linear layers, or attention alone if there are experts.

    A model with a weight of three dimensions counts as a mixture of experts.
    """
    if all(parameter.ndim < 3 for parameter in model.parameters()):
        return "all-linear"
    logging.getLogger(__name__).info("LoRA is put on attention: experts stay as they are")
    layer_names = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "attn" in name:
            layer_names.add(name.rpartition(".")[2])
    return sorted(layer_names)


def take_up(model: Any, adapter: Path, *, seed: int, rank: int | None = None) -> Any:
    """Load an adapter onto `model` with trainable weights. Raises PastaError for another rank."""
    from peft import PeftModel

    torch.manual_seed(seed)
    refuse_learned_eagerness(adapter)
    peft_model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    settings: Any = peft_model.peft_config["default"]
    refuse_foreign(vars(settings), f"the adapter in {adapter}")
    if rank not in (None, settings.r):
        raise PastaError(f"{adapter} has LoRA of rank {settings.r}: give --lora-rank {settings.r}")
    # The adapter's name for its base may be one of the hub, where peft would look at each save.
    settings.base_model_name_or_path = ""
    return peft_model


def refuse_learned_eagerness(adapter: Path) -> None:
    """Raise PastaError if the adapter has a learned eagerness. It cannot be trained further.

    A training forward does not add its biases, and peft ties its rows of the head to the embeddings
    if the base model does.
    """
    record = read_checkpoint(adapter)
    if record.promise_bias or record.sync_bias:
        raise PastaError(
            f"{adapter} has a learned eagerness and cannot be trained further",
            hint="Give the adapter that its eagerness was learned for.",
        )


def in_4bit(dtype: str) -> Any:
    """Return transformers' settings for a base model in NF4 (QLoRA) that computes in `dtype`.

    Raises PastaError without a GPU or bitsandbytes.
    """
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        raise PastaError(
            "load_in_4bit needs a GPU and bitsandbytes", hint="pip install bitsandbytes"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )


def recompute_activations(model: Any) -> None:
    """Let the backward pass compute activations again, so that none are kept in memory."""
    settings = {"use_reentrant": False}
    # transformers 5.23 has a new name and warns of the old one; 5.17 has only the old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_enable(settings)


def shard_tied_together(model: Any) -> None:
    """Let FSDP shard tied embeddings and output layer as one piece. Call it before training.

    They share a weight, which may be sharded only once. accelerate 1.15 checks for that, but cannot
    see it through peft's wrappers and would shard both layers. Without the two getters it finds
    neither of them.
    """
    if model.config.get_text_config().tie_word_embeddings:
        model.get_input_embeddings = lambda: None
        model.get_output_embeddings = lambda: None


def save(loaded: LoadedModel, folder: Path, *, weights: dict[str, Tensor] | None = None) -> Path:
    """Write the trained weights in bfloat16, all or nothing; return the folder.

    With LoRA, these are LoRA's weights and the control-token rows. Else it is a whole model, as
    `pasta export --to hf` writes it. Such a model is a base model of its own, and `pasta.json`
    describes it as one.

    weights: the state of the whole model if `loaded.model` holds only a shard of it.
    """
    model = loaded.model
    checkpoint = loaded.checkpoint
    with written_whole(folder) as partial:
        if hasattr(model, "peft_config"):
            full_state = weights or dict(model.named_parameters())
            state = {
                name: full_state[name].detach().to(torch.bfloat16)
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            model.peft_config["default"].base_model_name_or_path = checkpoint.base.name
            # The trained rows are saved in any case. With "auto", peft would look on the hub.
            model.save_pretrained(partial, state_dict=state, save_embedding_layers=False)
            (partial / "README.md").unlink(missing_ok=True)
            write_checkpoint(checkpoint, partial)
        else:
            if weights is None:
                described = model.to(torch.bfloat16)
            else:
                weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
                described = checkpoints.ModelStub(model.config, weights)
            base = checkpoints.describe_base(described, checkpoint.base.name)
            model.save_pretrained(partial, state_dict=weights)
            new_base = replace(loaded, checkpoint=replace(checkpoint, base=base))
            write_beside_weights(new_base, partial)
    return folder
