"""Stage 1: supervised finetuning on annotated responses, LoRA plus the control-token rows.

Shapes: T tokens of a pack, L labelled tokens, V vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.score import model_inputs
from pasta_decoding.data.view import View, compile_answer, pack, view
from pasta_decoding.engines.windows import attention_windows
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Span, read, strip
from pasta_decoding.models import binding as bindings
from pasta_decoding.models.binding import Binding, Checkpoint
from pasta_decoding.models.loading import load_base
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.train.loss import LossMeter
from pasta_decoding.train.metrics import MetricsFile, plot_losses


@dataclass(frozen=True, slots=True)
class SftConfig:
    """One finetuning run; its resolved form is `config.json` in the run folder.

    start:          folder of an adapter to go on from; None starts a new one.
    plain:          take the tags out: the sequential baseline of the same responses.
    max_tokens:     tokens of one answer with its prompt; a longer one is cut between parts.
    pack_tokens:    tokens of one pack, the unit of a forward pass.
    packs_per_step: packs whose gradients make one optimiser step.
    max_steps:      optimiser steps at most; None for all epochs. The schedule ends there.
    bf16:           bfloat16 weights and activations; LoRA and its optimiser stay float32.
    """

    data: tuple[str, ...]
    base_name: str
    start: str | None = None
    plain: bool = False
    scheme: str = "shared-max"
    epochs: int = 3
    learning_rate: float = 4e-4
    warmup_steps: int = 20
    lora_rank: int = 16
    max_tokens: int = 640
    pack_tokens: int = 512
    packs_per_step: int = 4
    max_steps: int | None = None
    save_every_steps: int = 50
    seed: int = 0
    bf16: bool = True


def train_sft(
    config: SftConfig,
    rows: Sequence[Row],
    *,
    base: Path,
    out: Path,
    say: Callable[[str], None],
) -> Path:
    """Train, resuming if `out` holds this run, and return the folder of the finished adapter."""
    resume = find_run(out, config)
    model, tokenizer = load_base(base, dtype="bfloat16" if config.bf16 else "float32")
    binding = bindings.bind(tokenizer)
    checkpoint = bindings.describe(model, tokenizer, binding, name=config.base_name)
    bindings.grow_vocabulary(model, binding)
    layouts = compile_rows(rows, tokenizer, binding, config, say)
    packs = plan_packs(layouts, config)
    say(f"{len(layouts)} answers, {_tokens(packs)} tokens in {len(packs)} packs")
    model = add_lora(model, binding, config)
    with _disk_errors(out):
        begin_run(out, config)
        run_trainer(model, packs, binding, config, out, resume)
        plot_losses(out / "metrics.jsonl", out / "loss.png")
        return save_adapter(model, checkpoint, out / "adapter")


def find_run(out: Path, config: SftConfig) -> Path | None:
    """Return the last whole checkpoint of this run in `out`. Refuses a folder of another run."""
    path = out / "config.json"
    if path.exists() and path.read_text(encoding="utf-8") != _resolved(config):
        raise PastaError(
            f"{out} holds a run with other settings",
            hint="Choose another --out, or repeat the settings in its config.json to resume it.",
        )
    whole = [state.parent for state in out.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def begin_run(out: Path, config: SftConfig) -> None:
    """Create the run folder with the resolved settings in it, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "config.json.partial"
    partial.write_text(_resolved(config), encoding="utf-8")
    os.replace(partial, out / "config.json")


def _resolved(config: SftConfig) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk is any of these, by who noticed it; torch names its writer's source file.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise PastaError(
            f"cannot write the run in {out}: {error}",
            hint="Make room there; the same command goes on from the last checkpoint.",
        ) from error


def compile_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    binding: Binding,
    config: SftConfig,
    say: Callable[[str], None],
) -> list[Layout]:
    """Lay every row out behind its prompt; rows that cannot fit are counted and left out."""
    encoder = PromptEncoder(tokenizer, forbidden_ids=binding.ids)
    scheme = scheme_named(config.scheme)
    layouts = []
    for row in rows:
        tree = read(row.response)
        layout = compile_answer(
            encoder.encode([Message("user", row.instruction)]),
            (Span(strip(tree)),) if config.plain else tree,
            binding=binding,
            encode=encoder.encode_text,
            scheme=scheme,
            end=tokenizer.eos_token_id,
            max_tokens=config.max_tokens,
        )
        if layout is not None:
            layouts.append(layout)
    if len(layouts) < len(rows):
        say(f"{len(rows) - len(layouts)} rows left out: longer than {config.max_tokens} tokens")
    if not layouts:
        raise PastaError("no row to train on", hint="Raise --max-length or give other --data.")
    return layouts


def plan_packs(layouts: Sequence[Layout], config: SftConfig) -> list[list[Layout]]:
    """Fix the packs of the whole run in advance, so that a resumed run sees the same ones."""
    packs = []
    shuffle = random.Random(config.seed)
    for _ in range(config.epochs):
        order = list(layouts)
        shuffle.shuffle(order)
        packs += pack(order, config.pack_tokens)
    limit = None if config.max_steps is None else config.max_steps * config.packs_per_step
    return packs[:limit]


def add_lora(model: Any, binding: Binding, config: SftConfig) -> Any:
    """Put LoRA on every linear layer, and make the control-token rows trainable.

    With `start`, that adapter's are taken up again.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(config.seed)
    if config.start is not None:
        return PeftModel.from_pretrained(model, config.start, is_trainable=True)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=2 * config.lora_rank,
        target_modules="all-linear",
        trainable_token_indices={"embed_tokens": sorted(binding.ids)},
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


def run_trainer(
    model: Any,
    packs: Sequence[Sequence[Layout]],
    binding: Binding,
    config: SftConfig,
    out: Path,
    resume: Path | None,
) -> None:
    """Let transformers' Trainer do the loop: accumulation, schedule, checkpoints, progress."""
    from transformers import Trainer, TrainingArguments

    meter = LossMeter(binding.ids)
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=config.packs_per_step,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=config.warmup_steps,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=5,
        save_steps=config.save_every_steps,
        save_total_limit=2,
        seed=config.seed,
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"view": view(layouts)} for layouts in packs],
        data_collator=partial(_collate, attention_windows(model.config.get_text_config())),
        compute_loss_func=meter.loss,
        callbacks=[MetricsFile(out / "metrics.jsonl", meter)],
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def _collate(windows: dict[str, int | None], examples: list[dict[str, View]]) -> dict[str, Any]:
    """Collate a batch of one pack; the T x T masks are made here, so that they live for a step."""
    (example,) = examples
    pack_view = example["view"]
    return {**model_inputs(pack_view, windows), "labels": pack_view.label_L[None]}


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


def _tokens(packs: Sequence[Sequence[Layout]]) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)
