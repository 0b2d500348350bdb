"""How both stages run: transformers' Trainer, which watches itself.

The Trainer brings accumulation, schedule, checkpoints, and accelerate's launch, FSDP and DeepSpeed.
Here it keeps the metrics, refuses to save what is no number, and turns Ctrl-C into a checkpoint.
"""

import json
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pasta_decoding.data.lines import write_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint, write_checkpoint
from pasta_decoding.training.config import Config, SftConfig
from pasta_decoding.training.lora import shard_tied_together
from pasta_decoding.training.view import Example, Loss, LossParts, label_logprobs

Item = TypeVar("Item")
log = logging.getLogger(__name__)


def training_arguments(
    out: Path, config: Config, examples: int, device: str, *, evaluates: bool = False
) -> TrainingArguments:
    """Return the Trainer's settings. `examples` are those of the whole run."""
    per_step = examples_per_step(config)
    return TrainingArguments(
        output_dir=str(out),
        use_cpu=device == "cpu",
        num_train_epochs=1,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=per_step // processes().num_processes,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # an example is no tensor
        ddp_find_unused_parameters=False,
        logging_nan_inf_filter=False,  # `RunTrainer` stops instead
        disable_tqdm=True,  # `RunTrainer` logs more
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.learning_rate,
        warmup_steps=min(config.warmup_steps, -(-examples // per_step) // 10),
        lr_scheduler_type=config.schedule,
        save_steps=config.save_every_steps,
        save_total_limit=2,
        logging_steps=5 if isinstance(config, SftConfig) else 1,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.save_every_steps,
        report_to=list(config.report_to),
    )


def examples_per_step(config: Config) -> int:
    """Return how many make a step; PastaError for uneven shares or several GPUs a process."""
    of_sft, count = isinstance(config, SftConfig), processes().num_processes
    stage, name = ("sft", "packs_per_step") if of_sft else ("preference", "pairs_per_step")
    gpus = 0 if getattr(config, "device", None) == "cpu" else torch.cuda.device_count()
    if count == 1 < gpus:
        launch = f"accelerate launch -m pasta_decoding train {stage} ..."
        message = f"one process sees {gpus} GPUs"
        raise PastaError(message, hint=f"CUDA_VISIBLE_DEVICES=0, or {launch}")
    found: int = getattr(config, name)
    if found % count:
        raise PastaError(f"{name} is {found}, no multiple of the {count} processes")
    return found


def processes(**settings: Any) -> Any:
    """Join the processes that were launched together, before loading, which shards by them."""
    return PartialState(cpu=not torch.cuda.is_available(), **settings)


def share_of(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items that this process sees to; `gather_object` has those of all in order."""
    shared = processes()
    size = -(-len(items) // shared.num_processes)
    return items[shared.process_index * size :][:size]


def filled(examples: list[Example], per_step: int, processes: int) -> list[Example]:
    """Return the examples in an order that the processes take in turns, each the same number.

    So a step has the same ones however many processes share them. Left to itself the sampler would
    show the first ones again to fill the last turn; one of scale 0 teaches nothing.
    """
    rest = len(examples) % per_step
    whole, lacking = len(examples) - rest, -rest % processes
    last = [replace(one, scale=one.scale * (1 + lacking / rest)) for one in examples[whole:]]
    return examples[:whole] + last + [replace(one, scale=0.0) for one in last[-1:] * lacking]


def last_checkpoint(out: Path) -> Path | None:
    """Return the last checkpoint in `out` that was written to its end."""
    whole = {}
    for state in out.glob("checkpoint-*/trainer_state.json"):
        with suppress(ValueError):  # written last: where it is half there, saving was broken off
            json.loads(state.read_text(encoding="utf-8"))
            whole[int(state.parent.name.split("-")[1])] = state.parent
    return whole[max(whole)] if whole else None


class Meter:
    """Means of figures since the last reading, over all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, figures: LossParts) -> None:
        for name, value in figures.items():
            values = value.detach().double().cpu()
            found = torch.stack([values.sum(), torch.tensor(values.numel())])
            self._sums[name] = self._sums.get(name, 0) + found

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the means, and start anew. All processes read together, through `device`."""
        totals: Any = reduce({name: one.to(device) for name, one in self._sums.items()}, "sum")
        self._sums = {}
        return {name: float(total / count) for name, (total, count) in totals.items() if count}


class RunTrainer(Trainer, TrainerCallback):
    """The Trainer over the examples of a whole run, in their order; it is its own callback.

    `metrics.jsonl` and trackers get the loss and the means of its figures; a resumed run has the
    lines up to its checkpoint. The loss on `held_out` is the mean over its labels.

    checkpoint: is kept beside the weights of each checkpoint, so that it can be decoded with.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        examples: Sequence[Example],
        arguments: TrainingArguments,
        *,
        checkpoint: Checkpoint | None = None,
        held_out: Sequence[Example] = (),
    ) -> None:
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=list(examples),
            eval_dataset=list(held_out) or None,
            data_collator=lambda items: {"example": items[0]},
        )
        self.model_accepts_loss_kwargs = False  # the Trainer makes the mean over a step's examples
        self.remove_callback(PrinterCallback)  # it prints each line of logs to standard output
        self.add_callback(self)
        if self.is_fsdp_enabled:
            shard_tied_together(model)
        self._loss, self._checkpoint = loss, checkpoint
        self._out, self._meter = Path(str(arguments.output_dir)), Meter()
        sizes = (sum(len(one.tokens) for one in example.layouts) for example in examples)
        self._tokens = [0, *accumulate(sizes)]  # of the first 0, 1, 2, ... examples
        self._interrupted = False

    def run(self) -> dict[str, Tensor] | None:
        """Train from the last checkpoint on; return the whole model's state where it is sharded."""
        resume = last_checkpoint(self._out)
        self._first = int(resume.name.split("-")[1]) if resume else 0
        self._began_s = time.monotonic()
        # Several processes would not stop at the same step, so each of those stops at once.
        waits = self.args.world_size == 1
        before = signal.signal(signal.SIGINT, self._interrupt) if waits else None
        try:
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        finally:
            if waits:
                signal.signal(signal.SIGINT, before)
        if self._interrupted:
            raise KeyboardInterrupt
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return self.accelerator.get_state_dict(self.model_wrapped) if sharded else None

    def _interrupt(self, *_signal: object) -> None:
        """Make a checkpoint behind the step of the first Ctrl-C; the second one stops at once."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._interrupted = True
        log.info("stopping behind this step; Ctrl-C again stops at once")

    # What the Trainer calls

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_arguments: Any, **_: Any) -> Any:
        """Return the loss of one example. Raises PastaError if it is no number."""
        loss, figures = self._computed(model, inputs["example"])
        if not loss.isfinite():
            self._refuse(f"the loss is not a number at step {self.state.global_step + 1}")
        self._meter.add(figures)
        return loss

    def _computed(self, model: Any, example: Example) -> tuple[Tensor, LossParts]:
        loss, figures = self._loss(label_logprobs(self.model, example.layouts, model), example)
        fills = dict.fromkeys(figures, torch.empty(0))
        return loss * example.scale, figures if example.scale else fills

    def evaluate(self, *_arguments: Any, **_settings: Any) -> dict[str, float]:
        """Log the losses over all labels of the held-out examples."""
        model, meter = self.model_wrapped, Meter()
        model.eval()
        for batch in self.get_eval_dataloader():
            with torch.no_grad(), self.compute_loss_context_manager():
                meter.add(self._computed(model, batch["example"])[1])
        found = {f"eval_{name}": mean for name, mean in meter.read(self.args.device).items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:  # noqa: ARG002
        """Return 0: the Trainer cannot count them in what is no tensor."""
        return 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if asked; log and evaluate the last step wherever it falls."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
        if self._interrupted:
            control.should_log = control.should_save = control.should_training_stop = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint, with `pasta.json` if it holds an adapter.

        Raises PastaError for weights that are no numbers: the loss may be finite where its
        gradients overflow.
        """
        model: Any = self.model
        trained = (one for one in model.parameters() if one.requires_grad)
        if not all(bool(one.isfinite().all()) for one in trained):
            self._refuse(f"weights are no longer numbers after step {self.state.global_step}")
        super().save_model(output_dir, _internal_call)
        folder = Path(str(output_dir))
        holds_adapter = (folder / "adapter_config.json").is_file()
        if self._checkpoint and self.is_world_process_zero() and holds_adapter:
            write_checkpoint(self._checkpoint, folder)

    def _refuse(self, message: str) -> None:
        hint = "Begin again in another --out with a lower --learning-rate."
        good = last_checkpoint(self._out)
        if good is not None and (good / checkpoints.FILE_NAME).is_file():
            hint += f" --start {good} goes on from the last good state."
        raise PastaError(message, hint=hint)

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Add figures, tokens and seconds to a line of losses. All processes call this together.

        Losses are nats per labelled token; seconds are those of all training up to the line.
        """
        losses = [f"{name} {logs[name]:.3f}" for name in ("loss", "eval_loss") if name in logs]
        if losses:
            figures = self._meter.read(self.args.device) if "loss" in logs else {}
            step, spent_s = self.state.global_step, time.monotonic() - self._began_s
            tokens = self._tokens_until(step)
            pace = (tokens - self._tokens_until(self._first)) / spent_s
            left = timedelta(seconds=round((self._tokens[-1] - tokens) / pace))
            said = [f"step {step}/{self.state.max_steps}", *losses, f"{pace:.0f} tokens/s"]
            log.info("%s, %s left", ", ".join(said), left)
            earlier = (one for one in self.state.log_history if one["step"] <= self._first)
            spent_s += max((one.get("seconds", 0.0) for one in earlier), default=0.0)
            logs = {**figures, **logs, "tokens": tokens, "seconds": round(spent_s, 1)}
        super().log(logs, *arguments)
        if losses and self.is_world_process_zero():
            kept = [one for one in self.state.log_history if one.keys() & {"loss", "eval_loss"}]
            write_lines(self._out / "metrics.jsonl", kept)

    def _tokens_until(self, step: int) -> int:
        done = step * self.args.gradient_accumulation_steps * self.args.world_size
        return self._tokens[min(done, len(self._tokens) - 1)]
