"""How both stages run: transformers' Trainer, with callbacks of our own.

The Trainer brings accumulation, schedule, checkpoints, and accelerate's launch, FSDP and DeepSpeed.
`RunTrainer` adds the metrics, stops at losses and weights that are not finite, and turns Ctrl-C,
SIGTERM and SIGHUP into a checkpoint.
"""

import json
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pasta_decoding.data.lines import write_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import FILE_NAME, Checkpoint, write_checkpoint
from pasta_decoding.training.config import Config, SftConfig
from pasta_decoding.training.lora import shard_tied_together
from pasta_decoding.training.view import Example, Loss, LossParts, label_logprobs, tokens_of

Item = TypeVar("Item")
log = logging.getLogger(__name__)


def training_arguments(
    out: Path, config: Config, examples: int, device: str, *, evaluates: bool = False
) -> TrainingArguments:
    """Return the Trainer's settings.

    examples: number of examples in the whole run, of all processes together.
    """
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
        bf16=bool(config.bf16),
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
    """Return the number of examples in a step of all processes together.

    Raises PastaError if the processes cannot share a step evenly, or if a single process sees
    several GPUs.
    """
    if isinstance(config, SftConfig):
        stage = "sft"
        field_name = "packs_per_step"
        per_step = config.packs_per_step
        may_use_gpu = True
    else:
        stage = "preference"
        field_name = "pairs_per_step"
        per_step = config.pairs_per_step
        may_use_gpu = config.device != "cpu"
    process_count = processes().num_processes
    gpus = torch.cuda.device_count() if may_use_gpu else 0
    if process_count == 1 and gpus > 1:
        launch = f"accelerate launch -m pasta_decoding train {stage} ..."
        raise PastaError(
            f"one process sees {gpus} GPUs", hint=f"CUDA_VISIBLE_DEVICES=0, or {launch}"
        )
    if per_step % process_count:
        raise PastaError(
            f"{field_name} is {per_step}, no multiple of the {process_count} processes"
        )
    return per_step


def processes(**settings: Any) -> Any:
    """Join the processes that were launched together, and return accelerate's state of them.

    Call it before loading: FSDP and DeepSpeed shard a model by the processes.
    """
    return PartialState(cpu=not torch.cuda.is_available(), **settings)


def share_of(items: Sequence[Item]) -> Sequence[Item]:
    """Return this process's share of the items.

    The shares are consecutive, so `gather_object` restores the order of the items.
    """
    distributed_state = processes()
    share_size = -(-len(items) // distributed_state.num_processes)
    first = distributed_state.process_index * share_size
    return items[first : first + share_size]


def last_checkpoint(out: Path) -> Path | None:
    """Return the last complete checkpoint in `out`, or None."""
    folder_by_step = {}
    for state in out.glob("checkpoint-*/trainer_state.json"):
        # The Trainer writes this file last. If it is no JSON, saving was interrupted.
        with suppress(ValueError):
            json.loads(state.read_text(encoding="utf-8"))
            folder_by_step[_step_of(state.parent)] = state.parent
    return folder_by_step[max(folder_by_step)] if folder_by_step else None


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that save and stop a run; without SIGHUP under nohup, which ignores it."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


class Meter:
    """Means of loss parts since the last reading, over all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        """By name: the sum and the number of all values that were added."""

    def add(self, parts: LossParts) -> None:
        """Count each element of the tensors as one value."""
        for name, part in parts.items():
            values = part.detach().double().cpu()
            sum_and_count = torch.stack([values.sum(), torch.tensor(values.numel())])
            self._sums[name] = self._sums.get(name, 0) + sum_and_count

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the means, and start anew. All processes must call it together.

        device: where the processes exchange their sums.
        """
        sums = {name: sum_and_count.to(device) for name, sum_and_count in self._sums.items()}
        totals: Any = reduce(sums, "sum")
        self._sums = {}
        return {name: float(total / count) for name, (total, count) in totals.items() if count}


class Watcher(Protocol):
    """What a run asks while it trains: `watch.Watch` of stage 2."""

    stop_reason: str | None

    def begin(self, model: Any, step: int) -> None: ...

    def record(self, parts: LossParts) -> None: ...

    def check(self, model: Any, step: int) -> None: ...

    def is_slow(self, step: int) -> bool: ...


class RunTrainer(Trainer, TrainerCallback):
    """The Trainer over the examples of a whole run, in their order. It is its own callback.

    `metrics.jsonl` and trackers get the loss and the means of its parts. A resumed run begins with
    the lines up to its checkpoint. The loss on `held_out` is the mean over its labels.

    checkpoint: written next to the weights of each saved adapter, so that it can be decoded with.
    watch:      may stop the run.
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
        watch: Watcher | None = None,
    ) -> None:
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=list(examples),
            eval_dataset=list(held_out) or None,
            data_collator=lambda items: {"example": items[0]},
        )
        self.model_accepts_loss_kwargs = False  # so the Trainer takes the mean over the examples
        self.remove_callback(PrinterCallback)  # it prints each line of logs to standard output
        self.add_callback(self)
        if self.is_fsdp_enabled:
            shard_tied_together(model)
        self._loss = loss
        self._checkpoint = checkpoint
        self._watch = watch
        self._out = Path(str(arguments.output_dir))
        self._meter = Meter()
        example_tokens = [tokens_of([example.layouts]) for example in examples]
        self._cumulative_tokens = [0, *accumulate(example_tokens)]
        self._interrupted = False

    def run(self) -> dict[str, Tensor] | None:
        """Train from the last checkpoint on.

        Returns the state of the whole model if it is sharded, else None: the model holds it then.
        """
        resume = last_checkpoint(self._out)
        self._first_step = _step_of(resume) if resume else 0
        self._began_s = time.monotonic()
        # Several processes would not stop at the same step, so they stop at once.
        stop_signals = _stop_signals() if self.args.world_size == 1 else []
        previous_handlers = {
            number: signal.signal(number, self._interrupt) for number in stop_signals
        }
        try:
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
        if self._interrupted:
            raise KeyboardInterrupt
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return self.accelerator.get_state_dict(self.model_wrapped) if sharded else None

    def _interrupt(self, *_signal: object) -> None:
        """Save after this step and stop. From then on, Ctrl-C stops at once.

        SIGTERM and SIGHUP do not: a terminal that closes may send two.
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._interrupted = True
        log.info("stopping behind this step; Ctrl-C again stops at once")

    # What the Trainer calls

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_arguments: Any, **_: Any) -> Any:
        """Return the loss of one example. Raises PastaError if it is not finite."""
        loss, parts = self._compute(model, inputs["example"])
        if not loss.isfinite():
            self._refuse(f"the loss is not a number at step {self.state.global_step + 1}")
        self._meter.add(parts)
        if self._watch is not None:
            self._watch.record(parts)
        return loss

    def _compute(self, model: Any, example: Example) -> tuple[Tensor, LossParts]:
        """Return the scaled loss and its parts; an example that only fills a step has no parts."""
        loss, parts = self._loss(label_logprobs(self.model, example.layouts, model), example)
        if example.scale == 0:
            parts = dict.fromkeys(parts, torch.empty(0))
        return loss * example.scale, parts

    def evaluate(self, *_arguments: Any, **_settings: Any) -> dict[str, float]:
        """Log the mean losses over all labels of the held-out examples."""
        model = self.model_wrapped
        model.eval()
        meter = Meter()
        for batch in self.get_eval_dataloader():
            with torch.no_grad(), self.compute_loss_context_manager():
                _, parts = self._compute(model, batch["example"])
                meter.add(parts)
        means = {f"eval_{name}": mean for name, mean in meter.read(self.args.device).items()}
        self.log(means)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, means)
        return means

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:  # noqa: ARG002
        """Return 0: the Trainer can only count the operations of inputs that are tensors."""
        return 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self._watch is not None:
            self._watch.begin(self.model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log and evaluate the last step, even between two intervals.

        Stop after a signal, and when the watch has a reason.
        """
        if self._watch is not None:
            self._watch.check(self.model, state.global_step)
            if self._watch.is_slow(state.global_step):
                self._double_learning_rate()
            if self._watch.stop_reason:
                log.info("training stops: %s", self._watch.stop_reason)
                control.should_log = True
                control.should_training_stop = True
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
        if self._interrupted:
            control.should_log = True
            control.should_save = True
            control.should_training_stop = True

    def _double_learning_rate(self) -> None:
        """Double the learning rate of the coming steps; a checkpoint keeps that."""
        scheduler: Any = self.lr_scheduler
        scheduler.base_lrs = [2 * rate for rate in scheduler.base_lrs]
        log.info("the best answers have hardly risen: the learning rate is doubled")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint, with `pasta.json` if it holds an adapter.

        Raises PastaError if weights are not finite. The loss may still be finite then: gradients
        overflow earlier.
        """
        model: Any = self.model
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                self._refuse(f"weights are no longer numbers after step {self.state.global_step}")
        super().save_model(output_dir, _internal_call)
        folder = Path(str(output_dir))
        holds_adapter = (folder / "adapter_config.json").is_file()
        if self._checkpoint and self.is_world_process_zero() and holds_adapter:
            write_checkpoint(self._checkpoint, folder)

    def _refuse(self, message: str) -> NoReturn:
        """Raise PastaError with the last good checkpoint in its hint."""
        hint = "Begin again in another --out with a lower --learning-rate."
        checkpoint = last_checkpoint(self._out)
        if checkpoint is not None and (checkpoint / FILE_NAME).is_file():
            hint += f" --start {checkpoint} goes on from the last good state."
        raise PastaError(message, hint=hint)

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Add loss parts, tokens and seconds to a line of losses, and write `metrics.jsonl`.

        Losses are nats per labelled token. Seconds are the training time up to the line, earlier
        runs included. All processes call this together.
        """
        has_losses = "loss" in logs or "eval_loss" in logs
        if has_losses:
            parts = self._meter.read(self.args.device) if "loss" in logs else {}
            elapsed_s = time.monotonic() - self._began_s
            tokens = self._tokens_until(self.state.global_step)
            self._log_progress(logs, tokens, elapsed_s)
            seconds = round(self._seconds_before() + elapsed_s, 1)
            logs = {**parts, **logs, "tokens": tokens, "seconds": seconds}
        super().log(logs, *arguments)
        if has_losses and self.is_world_process_zero():
            history = self.state.log_history
            lines = [line for line in history if "loss" in line or "eval_loss" in line]
            write_lines(self._out / "metrics.jsonl", lines)

    def _log_progress(self, logs: dict[str, float], tokens: int, elapsed_s: float) -> None:
        """Log step, losses, speed and the time until the end of the run."""
        losses = [f"{name} {logs[name]:.3f}" for name in ("loss", "eval_loss") if name in logs]
        tokens_per_s = (tokens - self._tokens_until(self._first_step)) / elapsed_s
        remaining_s = (self._cumulative_tokens[-1] - tokens) / tokens_per_s
        log.info(
            "step %d/%d, %s, %.0f tokens/s, %s left",
            self.state.global_step,
            self.state.max_steps,
            ", ".join(losses),
            tokens_per_s,
            timedelta(seconds=round(remaining_s)),
        )

    def _seconds_before(self) -> float:
        """Return the seconds that were trained up to the checkpoint that this run resumed."""
        history = self.state.log_history
        seconds = [line.get("seconds", 0.0) for line in history if line["step"] <= self._first_step]
        return max(seconds, default=0.0)

    def _tokens_until(self, step: int) -> int:
        """Count the tokens of all examples up to the end of a step."""
        examples = step * self.args.gradient_accumulation_steps * self.args.world_size
        return self._cumulative_tokens[min(examples, len(self._cumulative_tokens) - 1)]
