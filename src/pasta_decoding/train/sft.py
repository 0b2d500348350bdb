"""Stage 1: supervised finetuning on annotated responses, LoRA plus the control-token rows.

Shapes: T tokens of a pack, L labelled tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from pasta_decoding.models.binding import Binding
from pasta_decoding.models.loading import load_base
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.train.lora import add_lora, save_adapter
from pasta_decoding.train.loss import LossMeter
from pasta_decoding.train.metrics import MetricsFile, plot_losses
from pasta_decoding.train.run import begin_run, disk_errors, find_run


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
    model = add_lora(model, binding, rank=config.lora_rank, seed=config.seed, start=config.start)
    with disk_errors(out):
        begin_run(out, config)
        run_trainer(model, packs, binding, config, out, resume)
        plot_losses(out / "metrics.jsonl", out / "loss.png")
        return save_adapter(model, checkpoint, out / "adapter")


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


def _tokens(packs: Sequence[Sequence[Layout]]) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)
