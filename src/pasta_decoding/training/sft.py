"""Stage 1: supervised finetuning on annotated responses.

LoRA plus the control-token rows, or all weights. `loop.py` steps through what is planned here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.data.dataset import Row, digest
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Span, has_chunk, read, strip, without_topics
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.control_tokens import ControlTokens, choose_tokens, grow_vocabulary
from pasta_decoding.models.load import (
    answer_end,
    eos_ids_of,
    holds_weights,
    load_base,
)
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.launch import recompute_activations, set_attention, training_arguments
from pasta_decoding.training.loop import run_trainer
from pasta_decoding.training.lora import add_lora, lora_rank, save_adapter, save_whole
from pasta_decoding.training.metrics import plot_losses
from pasta_decoding.training.progress import Show, Watching
from pasta_decoding.training.run import (
    begin_run,
    disk_errors,
    find_run,
    finish_run,
    finished_run,
    refuse_other_inputs,
)
from pasta_decoding.training.view import compile_answer, pack

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import TrainingArguments


def train_sft(
    config: SftConfig,
    rows: Sequence[Row],
    *,
    base: Path,
    out: Path,
    say: Callable[[str], None],
    held_out: Sequence[Row] = (),
    show: Show = lambda _progress: None,
    report_to: Sequence[str] = (),
) -> Path:
    """Train, resuming if `out` holds this run, and return the folder of the finished adapter.

    A run that is finished is left as it is, and its figures are said again.
    held_out:  rows whose loss is measured on the way; those of `eval_share` are found here.
    show:      hears how far it is, forward pass by forward pass.
    report_to: trackers that the Trainer logs to, by its names.

    Under `accelerate launch` every process calls this, and all must see `out`; the main one writes,
    and none returns before it has.
    """
    from accelerate import PartialState

    if not rows:
        raise PastaError("no row to train on", hint="Give --data.")
    arguments = _arguments(config, out, evaluates=bool(held_out), report_to=report_to)
    resume = find_run(out, config)
    inputs: dict[str, Any] = {"rows": digest(rows), "held_out": digest(held_out)}
    refuse_other_inputs(out, inputs)
    if finished_run(out, say):
        return out / "adapter"
    model, tokenizer, checkpoint = _load(base, config, arguments.device, say)
    inputs["base"] = asdict(checkpoint.base)
    refuse_other_inputs(out, inputs)
    packs, evaluated = _plan(rows, held_out, model, tokenizer, checkpoint.control, config, say)
    with disk_errors(out):
        if arguments.should_save:
            begin_run(out, config, inputs)
        watching = Watching(say, show)
        weights = run_trainer(model, packs, evaluated, checkpoint, arguments, resume, watching)
        if arguments.should_save:
            _save(model, tokenizer, checkpoint, config, out, weights)
            finish_run(out, _tokens(packs), say)
    # Where one process ends badly the launcher ends all: not while the main one writes.
    PartialState().wait_for_everyone()
    return out / "adapter"


def _arguments(
    config: SftConfig, out: Path, *, evaluates: bool, report_to: Sequence[str]
) -> TrainingArguments:
    if config.start is not None and not config.lora_rank:
        raise PastaError(
            "all weights are to be trained, so there is no adapter to go on from",
            hint="Merge it first, `pasta export --to hf`, and give --model what that wrote.",
        )
    return training_arguments(
        out,
        config,
        config.packs_per_step,
        logging_steps=5,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.save_every_steps,
        report_to=list(report_to),
    )


def _load(
    base: Path, config: SftConfig, device: torch.device, say: Callable[[str], None]
) -> tuple[Any, Any, Checkpoint]:
    """Return the model to train, its tokenizer, and what the trained checkpoint will be."""
    frozen_in_bf16 = config.bf16 and config.lora_rank > 0
    model, tokenizer = load_base(base, dtype="bfloat16" if frozen_in_bf16 else "float32")
    control = choose_tokens(tokenizer)
    checkpoint = replace(
        checkpoints.describe(model, tokenizer, control, name=config.base_name),
        scheme=scheme_named(config.scheme).name,
        topic=config.topic,
        joins=tuple(join.value for join in config.joins),
    )
    if config.start is not None:
        _check_start(Path(config.start), config.lora_rank, model, tokenizer, control, say)
    grow_vocabulary(model, control)
    attention = set_attention(model, config.attention, on_gpu=device.type == "cuda")
    say(f"attention: {attention}")
    if config.gradient_checkpointing:
        recompute_activations(model)
    if config.lora_rank:
        rank, seed, start = config.lora_rank, config.seed, config.start
        model = add_lora(model, control, rank=rank, seed=seed, start=start)
    return model, tokenizer, checkpoint


def _check_start(
    start: Path,
    rank: int,
    model: Any,
    tokenizer: Any,
    control: ControlTokens,
    say: Callable[[str], None],
) -> None:
    """Refuse to go on from what is no adapter of this model, or one of another rank."""
    if holds_weights(start):
        raise PastaError(
            f"{start} holds a whole model, not an adapter to go on from",
            hint="Give it as --model, and leave --start out.",
        )
    record = checkpoints.load(start)
    if warning := checkpoints.check_match(record, model, tokenizer):
        say(warning)
    if record.control != control:
        raise PastaError(f"{start} writes its tags with other control tokens than this version")
    if (its_rank := lora_rank(start)) != rank:
        raise PastaError(
            f"{start} has LoRA of rank {its_rank}, which stays",
            hint=f"Give --lora-rank {its_rank}.",
        )


def _plan(
    rows: Sequence[Row],
    held_out: Sequence[Row],
    model: Any,
    tokenizer: Any,
    control: ControlTokens,
    config: SftConfig,
    say: Callable[[str], None],
) -> tuple[list[list[Layout]], list[list[Layout]]]:
    """Return the packs of the run, and those that are held out, and say how much that is."""
    end = answer_end(tokenizer, eos_ids_of(model, tokenizer))
    layouts, evaluated = (
        compile_rows(some, tokenizer, control, config, say, end=end) if some else []
        for some in (rows, held_out)
    )
    packs = plan_packs(layouts, config)
    what = "rows" if Joining.text in config.joins else "answers"
    say(f"{len(layouts)} {what}, {_tokens(packs)} tokens in {len(packs)} packs")
    if evaluated:
        say(f"{len(evaluated)} {what}, {_tokens([evaluated])} tokens are held out")
    return packs, pack(evaluated, config.pack_tokens)


def compile_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    control: ControlTokens,
    config: SftConfig,
    say: Callable[[str], None],
    *,
    end: int,
) -> list[Layout]:
    """Lay every row out between its prompt and `end`; rows that cannot be used are left out."""
    encoder = PromptEncoder(tokenizer, forbidden_ids=control.ids)
    layouts: list[Layout] = []
    left_out: dict[str, list[str]] = {}
    for row in rows:
        try:
            layouts += compile_row(row, encoder, control, config, end=end)
        except PastaError as reason:
            left_out.setdefault(str(reason), []).append(row.id)
    for why, ids in left_out.items():
        say(f"{len(ids)} rows left out, the first is {ids[0]}: {why}")
    if not layouts:
        raise PastaError("no row to train on", hint="Raise --max-length or give other rows.")
    return layouts


def compile_row(
    row: Row, encoder: PromptEncoder, control: ControlTokens, config: SftConfig, *, end: int
) -> list[Layout]:
    """Lay one row out, for each join.

    Raises PastaError, which says why, if it teaches nothing or wrong things.
    """
    has_topics = config.topic == "required"
    tree = read(row.response) if has_topics else without_topics(read(row.response))
    text = strip(tree)
    if problems := check(row.response, topic_required=has_topics):
        raise PastaError(f"broken tags ({problems[0].rule})")
    if has_chunk(read(text)):
        raise PastaError("annotated twice: its tags are text")
    if not text.strip():
        raise PastaError("empty response")
    layouts = compile_answer(
        encoder.encode(row.conversation),
        (Span(text),) if config.plain else tree,
        control=control,
        encode=encoder.encode_text,
        scheme=scheme_named(config.scheme),
        end=end,
        max_tokens=config.max_tokens,
        joinings=config.joins,
    )
    if not layouts:
        raise PastaError(f"longer than {config.max_tokens} tokens")
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


def _save(
    model: Any,
    tokenizer: Any,
    checkpoint: Checkpoint,
    config: SftConfig,
    out: Path,
    weights: dict[str, Tensor] | None,
) -> None:
    """Keep the plot of the losses, and the adapter or the model."""
    plot_losses(out / "metrics.jsonl", out / "loss.png")
    folder = out / "adapter"
    if config.lora_rank:
        save_adapter(model, checkpoint, folder, weights=weights)
    else:
        save_whole(model, tokenizer, checkpoint, folder, weights=weights)


def _tokens(packs: Sequence[Sequence[Layout]]) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)
