"""What a run is started with: processes, devices, attention, and the Trainer's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from pasta_decoding.training.config import PairConfig, SftConfig

_EVERY_RUN: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "lr_scheduler_type": "linear",
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "prediction_loss_only": True,
    "dataloader_pin_memory": False,  # block masks are made where they are needed
    "ddp_find_unused_parameters": False,
    "logging_nan_inf_filter": False,  # `FiniteGuard` stops instead
    "save_total_limit": 2,
    "disable_tqdm": True,  # `ProgressReport` tells more
}


def training_arguments(
    out: Path, config: SftConfig | PairConfig, packs_per_step: int, **settings: Any
) -> TrainingArguments:
    """Return the Trainer's settings: those of `config`, of every run, and `settings`.

    Making them joins the processes that were launched together. That comes before the model is
    loaded: where it will be sharded, loading must know.
    """
    from transformers import TrainingArguments

    use_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out),
        gradient_accumulation_steps=_packs_of_each(packs_per_step, use_cpu=use_cpu),
        use_cpu=use_cpu,
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        save_steps=config.save_every_steps,
        **_EVERY_RUN,
        **settings,
    )
    if arguments.n_gpu > 1:
        raise PastaError(
            f"one process sees {arguments.n_gpu} GPUs",
            hint="Let it see one: CUDA_VISIBLE_DEVICES=0. Stage 1 also takes several, a process "
            "each: accelerate launch -m pasta_decoding train sft ...",
        )
    return arguments


def _packs_of_each(packs_per_step: int, *, use_cpu: bool) -> int:
    """Return how many packs of a step each process takes."""
    from accelerate import PartialState

    processes = PartialState(cpu=use_cpu).num_processes
    if packs_per_step % processes:
        raise PastaError(
            f"{packs_per_step} packs a step cannot be shared by {processes} processes",
            hint=f"Give --packs-per-step a multiple of {processes}.",
        )
    return packs_per_step // processes


def set_attention(model: Any, wanted: str, *, on_gpu: bool) -> str:
    """Let `model` compute the attention that is `wanted`, and say which that is.

    wanted: "flex" with block masks, "dense" masks, or "auto": flex on a GPU.
    """
    if wanted == "dense" or (wanted == "auto" and not on_gpu):
        return f"{model.config.get_text_config()._attn_implementation}, with dense masks"
    if not on_gpu:
        raise PastaError(
            "flex attention has no backward pass on a CPU", hint="Leave --attention out."
        )
    model.set_attn_implementation("flex_attention")
    return "flex, with block masks"


def recompute_activations(model: Any) -> None:
    """Compute activations again on the way back instead of keeping them."""
    # transformers 5.23 renames it, and warns of the only name that 5.17 knows.
    older, newer = "gradient_checkpointing_enable", "activation_checkpointing_enable"
    getattr(model, newer if hasattr(model, newer) else older)({"use_reentrant": False})
