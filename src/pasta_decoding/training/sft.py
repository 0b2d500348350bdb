"""Stage 1: supervised finetuning on annotated responses.

LoRA plus the control-token rows, or all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pasta_decoding.data.rows import Row, digest
from pasta_decoding.engines.support import attention_windows
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import FILE_NAME, Checkpoint
from pasta_decoding.models.control_tokens import ControlTokens, choose_tokens, grow_vocabulary
from pasta_decoding.models.load import answer_end, eos_ids_of, load_base
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loop import (
    RunCallback,
    RunTrainer,
    Say,
    Show,
    processes,
    training_arguments,
)
from pasta_decoding.training.lora import (
    add_lora,
    recompute_activations,
    refuse_other_start,
    save_adapter,
    save_whole,
    set_attention,
    shard_tied_together,
)
from pasta_decoding.training.loss import LabelLoss, Meter
from pasta_decoding.training.packs import (
    Packs,
    collate,
    compile_rows,
    plan_packs,
    share_out,
    tokens_of,
)
from pasta_decoding.training.run import (
    begin_run,
    figures_of,
    last_checkpoint,
    owned,
    plot_losses,
    refuse_other_inputs,
    refuse_other_run,
)
from pasta_decoding.training.trial import tried
from pasta_decoding.training.view import pack, takes_blocks

if TYPE_CHECKING:
    from transformers import TrainingArguments


def train_sft(
    config: SftConfig,
    rows: Sequence[Row],
    *,
    base: Path,
    out: Path,
    say: Say,
    held_out: Sequence[Row] = (),
    show: Show = lambda _done, _total, _words: None,
) -> Path:
    """Train, resuming if `out` holds this run, and return the folder of the finished adapter.

    A run that is finished is left as it is, and its figures are said again.
    held_out: rows whose loss is measured on the way.
    show:     hears how far it is, step by step.

    Under `accelerate launch` every process calls this, and all must see `out`; the main one writes,
    and none returns before it has.
    """
    if not rows:
        raise PastaError("no row to train on: give --data")
    adapter = out / "adapter"
    refuse_other_run(out, config)
    inputs: dict[str, Any] = {"rows": digest(rows), "held_out": digest(held_out)}
    refuse_other_inputs(out, inputs)
    if (adapter / FILE_NAME).is_file():
        say(f"this run is finished: {figures_of(out)}")
        return adapter
    device = processes().device
    model, tokenizer, checkpoint = _load(base, config, device, say)
    inputs["base"] = asdict(checkpoint.base)
    refuse_other_inputs(out, inputs)
    packs, evaluated = _plan(rows, held_out, model, tokenizer, checkpoint.control, config, say)
    arguments = training_arguments(
        out,
        config,
        len(packs),
        config.packs_per_step,
        device.type,
        logging_steps=5,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=config.save_every_steps,
    )
    with owned(out):
        if arguments.should_save:
            begin_run(out, config, inputs)
        weights = _train(model, packs, evaluated, checkpoint, arguments, say, show)
        if arguments.should_save:
            if config.lora_rank:
                save_adapter(model, checkpoint, adapter, weights=weights)
            else:
                save_whole(model, tokenizer, checkpoint, adapter, weights=weights)
            plot_losses(out)
            say(f"finished: {figures_of(out)}")
            if config.try_prompts and weights is None and not config.plain:
                asked = (held_out or rows)[: config.try_prompts]
                say(tried(model, tokenizer, checkpoint, [row.instruction for row in asked]))
    # Where one process ends badly the launcher ends all: not while the main one writes.
    processes().wait_for_everyone()
    return adapter


def _load(
    base: Path, config: SftConfig, device: torch.device, say: Say
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
    say: Say,
) -> tuple[list[list[Layout]], list[list[Layout]]]:
    """Return the packs of the run, and those that are held out, and say how much that is."""
    end = answer_end(tokenizer, eos_ids_of(model, tokenizer))
    layouts, evaluated = (
        compile_rows(some, tokenizer, control, config, say, end=end) if some else []
        for some in (rows, held_out)
    )
    packs = plan_packs(layouts, config)
    what = "rows" if Joining.text in config.joins else "answers"
    say(f"{len(layouts)} {what}, {tokens_of(packs)} tokens in {len(packs)} packs")
    if evaluated:
        say(f"{len(evaluated)} {what}, {tokens_of([evaluated])} tokens are held out")
    return packs, pack(evaluated, config.pack_tokens)


def _train(
    model: Any,
    packs: Packs,
    held_out: Packs,
    checkpoint: Checkpoint,
    arguments: TrainingArguments,
    say: Say,
    show: Show,
) -> dict[str, Tensor] | None:
    """Step through the packs.

    Return the state of the whole model where each process only holds a shard of it.
    """
    out = Path(str(arguments.output_dir))
    loss = LabelLoss(checkpoint.control.ids)
    watching = RunCallback(
        loss.meter,
        [tokens_of([layouts]) for layouts in packs],
        out=out,
        say=say,
        show=show,
        begin_again=partial(_begin_again, out, lora=hasattr(model, "peft_config")),
        checkpoint=checkpoint,
        processes=arguments.world_size,
    )
    trainer = SftTrainer(
        loss.meter,
        watching,
        held_out_loss=LabelLoss(checkpoint.control.ids),
        compute_loss_func=loss,
        model=model,
        args=arguments,
        train_dataset=share_out(packs, arguments.world_size),
        eval_dataset=share_out(held_out, arguments.world_size) if held_out else None,
        data_collator=partial(
            collate,
            windows=attention_windows(model.config.get_text_config()),
            device=arguments.device if takes_blocks(model) else None,
        ),
    )
    if trainer.is_fsdp_enabled:
        shard_tied_together(model)
    trainer.run()
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None


class SftTrainer(RunTrainer):
    """The Trainer, whose loss on held-out packs is the mean over their labels, not over packs."""

    def __init__(
        self, meter: Meter, watching: RunCallback, *, held_out_loss: LabelLoss, **settings: Any
    ) -> None:
        super().__init__(meter, watching, **settings)
        self._held_out_loss = held_out_loss

    def evaluate(self, *_arguments: Any, **_settings: Any) -> dict[str, float]:
        """Log the losses over all labels of the held-out packs."""
        model, loss = self.model_wrapped, self._held_out_loss
        model.eval()
        for batch in self.get_eval_dataloader():
            inputs = self._prepare_inputs(batch)
            labels = inputs.pop("labels")
            with torch.no_grad(), self.compute_loss_context_manager():
                loss(model(**inputs), labels)
        found = {f"eval_{name}": mean for name, mean in loss.meter.read(self.args.device).items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found


def _begin_again(out: Path, *, lora: bool) -> str:
    """Return what to do behind a step that spoilt the weights."""
    good = last_checkpoint(out)
    if good is None or not lora:
        return "Begin again in another --out with a lower --learning-rate."
    return (
        f"The last good state is {good}. Go on from there with --start {good}, another --out and "
        "a lower --learning-rate."
    )
