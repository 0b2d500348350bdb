"""Stage 1: supervised finetuning on annotated responses.

LoRA plus the control-token rows, or all weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pasta_decoding.data.dataset import Row, digest
from pasta_decoding.engines.support import attention_windows
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Span, has_chunk, read, strip, without_topics
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.control_tokens import ControlTokens, choose_tokens, grow_vocabulary
from pasta_decoding.models.load import answer_end, eos_ids_of, load_base
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loop import (
    MeteredTrainer,
    RunCallback,
    Show,
    recompute_activations,
    set_attention,
    training_arguments,
)
from pasta_decoding.training.lora import (
    add_lora,
    refuse_other_start,
    save_adapter,
    save_whole,
    shard_tied_together,
)
from pasta_decoding.training.loss import IGNORED, LossMeter
from pasta_decoding.training.run import (
    begin_run,
    find_run,
    finish_run,
    finished_run,
    last_checkpoint,
    owned,
    refuse_other_inputs,
)
from pasta_decoding.training.view import (
    PackedBatch,
    compile_answer,
    model_inputs,
    pack,
    packed_batch,
    takes_blocks,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments

Packs = Sequence[Sequence[Layout]]


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
    held_out:  rows whose loss is measured on the way.
    show:      hears how far it is, forward pass by forward pass.
    report_to: trackers that the Trainer logs to, by its names.

    Under `accelerate launch` every process calls this, and all must see `out`; the main one writes,
    and none returns before it has.
    """
    from accelerate import PartialState

    if not rows:
        raise PastaError("no row to train on: give --data")
    find_run(out, config)
    inputs: dict[str, Any] = {"rows": digest(rows), "held_out": digest(held_out)}
    refuse_other_inputs(out, inputs)
    if finished_run(out, say):
        return out / "adapter"
    # It joins the processes; a model that will be sharded is loaded behind it.
    arguments = training_arguments(out, config, config.packs_per_step)
    model, tokenizer, checkpoint = _load(base, config, arguments.device, say)
    inputs["base"] = asdict(checkpoint.base)
    refuse_other_inputs(out, inputs)
    packs, evaluated = _plan(rows, held_out, model, tokenizer, checkpoint.control, config, say)
    steps = -(-len(packs) // config.packs_per_step)
    arguments = training_arguments(
        out,
        config,
        config.packs_per_step,
        warmup_steps=min(config.warmup_steps, steps // 10),
        logging_steps=5,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=config.save_every_steps,
        report_to=list(report_to),
    )
    with owned(out):
        if arguments.should_save:
            begin_run(out, config, inputs)
        weights = _train(model, packs, evaluated, checkpoint, arguments, say, show)
        if arguments.should_save:
            if config.lora_rank:
                save_adapter(model, checkpoint, out / "adapter", weights=weights)
            else:
                save_whole(model, tokenizer, checkpoint, out / "adapter", weights=weights)
            finish_run(out, _tokens(packs), say)
    # Where one process ends badly the launcher ends all: not while the main one writes.
    PartialState().wait_for_everyone()
    return out / "adapter"


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
        refuse_other_start(Path(config.start), config.lora_rank, model, tokenizer, control, say)
    grow_vocabulary(model, control)
    attention = set_attention(model, config.attention, on_gpu=device.type == "cuda")
    say(f"attention: {attention}")
    if config.gradient_checkpointing:
        recompute_activations(model)
    if config.lora_rank:
        model = add_lora(
            model,
            control,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.seed,
            start=config.start,
        )
    return model, tokenizer, checkpoint


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


def _train(
    model: Any,
    packs: Packs,
    held_out: Packs,
    checkpoint: Checkpoint,
    arguments: TrainingArguments,
    say: Callable[[str], None],
    show: Show,
) -> dict[str, Tensor] | None:
    """Step through the packs.

    Return the state of the whole model where each process only holds a shard of it.
    """
    out, control_ids = Path(str(arguments.output_dir)), checkpoint.control.ids
    meter = LossMeter(control_ids)
    watching = RunCallback(
        meter,
        [_tokens([layouts]) for layouts in packs],
        out=out,
        say=say,
        show=show,
        begin_again=partial(_begin_again, out, lora=hasattr(model, "peft_config")),
        checkpoint=checkpoint,
        processes=arguments.world_size,
    )
    trainer = SftTrainer(
        meter,
        LossMeter(control_ids),
        model=model,
        args=arguments,
        train_dataset=share_out(packs, arguments.world_size),
        eval_dataset=share_out(held_out, arguments.world_size) if held_out else None,
        data_collator=partial(
            _collate,
            windows=attention_windows(model.config.get_text_config()),
            device=arguments.device if takes_blocks(model) else None,
        ),
        callbacks=[watching],
    )
    if trainer.is_fsdp_enabled:
        shard_tied_together(model)
    resume = last_checkpoint(out)
    with watching:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None


class SftTrainer(MeteredTrainer):
    """The Trainer, whose loss on held-out packs is the mean over their labels, not over packs."""

    def __init__(self, meter: LossMeter, held_out: LossMeter, **settings: Any) -> None:
        super().__init__(meter, compute_loss_func=meter.loss, **settings)
        self._held_out = held_out

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: ARG002 (the Trainer's signature)
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, None, None]:
        """Count the loss of one pack; what is returned only keeps the Trainer's loop going."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            self._held_out.loss(model(**inputs), labels, num_items_in_batch=1)
        return torch.zeros((), device=labels.device), None, None

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> Any:
        """Put the losses over all labels into the figures of an evaluation."""
        self._held_out.read(self.args.device)  # what a broken-off one left
        output = super().evaluation_loop(*arguments, **settings)
        means = self._held_out.read(self.args.device)
        assert output.metrics is not None, "an evaluation has figures"
        output.metrics.update({f"eval_{name}": mean for name, mean in means.items()})
        return output


def share_out(packs: Packs, processes: int) -> list[dict[str, PackedBatch]]:
    """Return the packs in an order that the processes take in turns, each the same number.

    So a step has the same packs however many processes share them. Left to itself the sampler
    would show the first packs again to fill the last turn; a pack without labels teaches nothing.
    """
    batches = [packed_batch(layouts) for layouts in packs]
    empty = torch.empty(0, dtype=torch.long)
    filler = replace(batches[-1], source_L=empty, label_L=empty)
    batches += [filler] * (-len(batches) % processes)
    return [{"batch": batch} for batch in batches]


def _collate(
    examples: list[dict[str, PackedBatch]],
    *,
    windows: dict[str, int | None],
    device: torch.device | None,
) -> dict[str, Any]:
    """Collate a batch of one pack; its masks are made here, so that they live for a step.

    device: where to make block masks; None for dense ones.
    """
    (example,) = examples
    batch = example["batch"] if device is None else example["batch"].to(device)
    # The Trainer counts the labels of a step for the loss. Some of its versions leave out the first
    # of each batch, which the models' own loss would shift away.
    labels = pad(batch.label_L, (1, 0), value=IGNORED)
    return {**model_inputs(batch, windows, blocks=device is not None), "labels": labels[None]}


def _begin_again(out: Path, *, lora: bool) -> str:
    """Return what to do behind a step that spoilt the weights."""
    good = last_checkpoint(out)
    if good is None or not lora:
        return "Begin again in another --out with a lower --learning-rate."
    return (
        f"The last good state is {good}. Go on from there with --start {good}, another --out and "
        "a lower --learning-rate."
    )


def _tokens(packs: Packs) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)
