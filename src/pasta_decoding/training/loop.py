"""Stage 1's loop: packs through transformers' Trainer, and what it tells on the way.

Shapes: L labelled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.training.guard import FiniteGuard
from pasta_decoding.training.lora import shard_tied_together
from pasta_decoding.training.loss import IGNORED, LossMeter
from pasta_decoding.training.metrics import MeteredTrainer, MetricsFile
from pasta_decoding.training.progress import ProgressReport, StopBehindStep, Watching
from pasta_decoding.training.run import last_checkpoint
from pasta_decoding.training.score import model_inputs, takes_blocks
from pasta_decoding.training.view import View, view

if TYPE_CHECKING:
    from transformers import TrainingArguments

Packs = Sequence[Sequence[Layout]]


def run_trainer(
    model: Any,
    packs: Packs,
    held_out: Packs,
    checkpoint: Checkpoint,
    arguments: TrainingArguments,
    resume: Path | None,
    watching: Watching,
) -> dict[str, Tensor] | None:
    """Let transformers' Trainer do the loop: accumulation, schedule, checkpoints, evaluation.

    Return the state of the whole model where each process only holds a shard of it.
    """
    out = Path(str(arguments.output_dir))
    meter = LossMeter(checkpoint.control.ids)
    stop = StopBehindStep(watching.say, processes=arguments.world_size)
    callbacks = [
        stop,
        LastStep(),
        FiniteGuard(meter, partial(_begin_again, out, lora=hasattr(model, "peft_config"))),
        MetricsFile(out / "metrics.jsonl"),
        ProgressReport(meter, [_tokens(pack) for pack in packs], watching.show),
        CheckpointRecord(checkpoint),
    ]
    trainer = SftTrainer(
        meter,
        LossMeter(checkpoint.control.ids),
        model=model,
        args=arguments,
        train_dataset=share_out(packs, arguments.world_size),
        eval_dataset=share_out(held_out, arguments.world_size) if held_out else None,
        data_collator=_collator(model, arguments.device),
        callbacks=callbacks,
    )
    if trainer.is_fsdp_enabled:
        shard_tied_together(model)
    with stop:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None


def _begin_again(out: Path, *, lora: bool) -> str:
    """Return what to do behind a step that spoilt the weights."""
    good = last_checkpoint(out)
    if good is None or not lora:
        return "Begin again in another --out with a lower --learning-rate."
    return (
        f"The last good state is {good}. Go on from there with --start {good}, another --out and "
        "a lower --learning-rate."
    )


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
            outputs = model(**inputs)
            self._held_out.loss(outputs, labels, num_items_in_batch=1)
        return torch.zeros((), device=labels.device), None, None

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> Any:
        """Put the losses over all labels into the figures of an evaluation."""
        self._held_out.read_all(self.args.device)  # what a broken-off one left
        output = super().evaluation_loop(*arguments, **settings)
        means = self._held_out.read_all(self.args.device)
        assert output.metrics is not None, "an evaluation has figures"
        output.metrics.update({f"eval_{name}": mean for name, mean in means.items()})
        return output


class LastStep(TrainerCallback):
    """Has the last step logged and evaluated, too, wherever it falls."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Ask for both; for an evaluation only if there are any."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"


class CheckpointRecord(TrainerCallback):
    """Writes `pasta.json` into each checkpoint, so that it can be decoded with and gone on from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def on_save(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002
        """Put the record beside the weights, where the checkpoint holds an adapter."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and (folder / "adapter_config.json").is_file():
            checkpoints.save(self._checkpoint, folder)


def share_out(packs: Packs, processes: int) -> list[dict[str, View]]:
    """Return the packs in an order that the processes take in turns, each the same number.

    So a step has the same packs however many processes share them. Left to itself the sampler
    would show the first packs again to fill the last turn; a pack without labels teaches nothing.
    """
    views = [view(layouts) for layouts in packs]
    empty = torch.empty(0, dtype=torch.long)
    filler = replace(views[-1], source_L=empty, label_L=empty)
    views += [filler] * (-len(views) % processes)
    return [{"view": pack_view} for pack_view in views]


def _collator(model: Any, device: torch.device) -> partial[dict[str, Any]]:
    windows = attention_windows(model.config.get_text_config())
    return partial(_collate, windows=windows, device=device if takes_blocks(model) else None)


def _collate(
    examples: list[dict[str, View]],
    *,
    windows: dict[str, int | None],
    device: torch.device | None,
) -> dict[str, Any]:
    """Collate a batch of one pack; its masks are made here, so that they live for a step.

    device: where to make block masks; None for dense ones.
    """
    (example,) = examples
    pack_view = example["view"] if device is None else example["view"].to(device)
    # The Trainer counts the labels of a step for the loss. Some of its versions leave out the first
    # of each batch, which the models' own loss would shift away.
    labels = pad(pack_view.label_L, (1, 0), value=IGNORED)
    return {
        **model_inputs(pack_view, windows, blocks=device is not None),
        "labels": labels[None],
    }


def _tokens(pack: Sequence[Layout]) -> int:
    return sum(len(layout.tokens) for layout in pack)
