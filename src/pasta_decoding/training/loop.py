"""How both stages run: transformers' Trainer, and one callback that watches it.

The Trainer brings accumulation, schedule, checkpoints with all states, and accelerate's launch,
FSDP and DeepSpeed. `RunCallback` keeps the metrics, tells the progress, refuses to save what is no
number, and turns Ctrl-C into a checkpoint.
"""

# ruff: noqa: ARG002 (callbacks have the Trainer's signatures)
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from pasta_decoding.data.lines import append_line, read_lines, write_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.training.loss import Meter
from pasta_decoding.training.run import last_checkpoint

if TYPE_CHECKING:
    from pasta_decoding.training.config import PreferenceConfig, SftConfig

GOES_ON = "the same command goes on"
Say = Callable[[str], None]
Show = Callable[[int, int, str], None]
"""Shows progress: so many of so many are done, and a few words."""
Draw = Callable[[str], AbstractContextManager[Show]]
"""Takes what is being done; as long as the context is open, what it hands out draws it."""

_EVERY_RUN: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,  # block masks are made where they are needed
    "ddp_find_unused_parameters": False,
    "logging_nan_inf_filter": False,  # `RunCallback` stops instead
    "save_total_limit": 2,
    "disable_tqdm": True,  # `RunCallback` tells more
}


def training_arguments(
    out: Path,
    config: SftConfig | PreferenceConfig,
    batches: int,
    batches_per_step: int,
    device: str,
    **settings: Any,
) -> TrainingArguments:
    """Return the Trainer's settings: those of `config`, of every run, and `settings`.

    batches: of the whole run.
    device:  "cpu", or the kind of accelerator.
    """
    shared = processes()
    if batches_per_step % shared.num_processes:
        raise PastaError(
            f"{batches_per_step} packs a step cannot be shared by {shared.num_processes} processes",
            hint=f"Give --packs-per-step a multiple of {shared.num_processes}.",
        )
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=device == "cpu",
        gradient_accumulation_steps=batches_per_step // shared.num_processes,
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.learning_rate,
        warmup_steps=min(config.warmup_steps, -(-batches // batches_per_step) // 10),
        lr_scheduler_type=config.schedule,
        save_steps=config.save_every_steps,
        report_to=list(config.report_to),
        **_EVERY_RUN,
        **settings,
    )
    if arguments.n_gpu > 1:
        raise PastaError(
            f"one process sees {arguments.n_gpu} GPUs",
            hint="CUDA_VISIBLE_DEVICES=0, or accelerate launch -m pasta_decoding train sft ...",
        )
    return arguments


def processes() -> Any:
    """Join the processes that were launched together; return their state.

    That comes before a model is loaded: where it will be sharded, loading must know.
    """
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


class RunTrainer(Trainer):
    """The Trainer, which logs what a meter collected: to files and to trackers."""

    def __init__(self, meter: Meter, watching: RunCallback, **settings: Any) -> None:
        super().__init__(callbacks=[watching], **settings)
        self.remove_callback(PrinterCallback)  # it prints each line of logs to standard output
        self.meter, self._watching = meter, watching

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Add the meter's figures to a line of losses. Takes all processes."""
        if "loss" in logs:
            logs = {**logs, **self.meter.read(self.args.device), "loss": logs["loss"]}
        super().log(logs, *arguments)

    def run(self) -> None:
        """Train, going on from the last checkpoint if there is one."""
        resume = last_checkpoint(Path(str(self.args.output_dir)))
        with self._watching:
            self.train(resume_from_checkpoint=str(resume) if resume else None)


class RunCallback(TrainerCallback):
    """Watches one run. Use it as a context around training.

    The first Ctrl-C becomes a checkpoint behind the step, and leaving the context raises
    KeyboardInterrupt then; the second one stops at once. Several processes would not stop at the
    same step, so each of those stops at once.

    batch_tokens: of each batch of the whole run, in order, prompts included.
    begin_again:  says what to do where the numbers went wrong.
    checkpoint:   is kept beside the weights of each checkpoint, so that it can be decoded with.
    """

    def __init__(
        self,
        meter: Meter,
        batch_tokens: Sequence[int],
        *,
        out: Path,
        say: Say,
        show: Show,
        begin_again: Callable[[], str],
        checkpoint: Checkpoint | None = None,
        processes: int = 1,
    ) -> None:
        self._meter, self._tokens, self._metrics = meter, batch_tokens, out / "metrics.jsonl"
        self._say, self._show, self._begin_again = say, show, begin_again
        self._checkpoint, self._alone = checkpoint, processes == 1
        self._losses: dict[str, float] = {}
        self._began_s = self._earlier_s = 0.0
        self._first = 0
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> RunCallback:
        here = threading.current_thread() is threading.main_thread()
        if here and self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._interrupted and exception[0] is None:
            raise KeyboardInterrupt(GOES_ON)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt(GOES_ON)
        self._interrupted = True
        self._say("stopping behind this step; Ctrl-C again stops at once")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Cut the metrics back to the step from which training goes on; start the clock."""
        self._began_s, self._first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            kept = [one for one in read_lines(self._metrics) if one["step"] <= state.global_step]
            write_lines(self._metrics, kept)
            self._earlier_s = kept[-1]["seconds"] if kept else 0.0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Look at the losses whose gradients are about to move the weights."""
        if not self._meter.finite:
            message = f"the loss is not a number at step {state.global_step + 1}"
            raise PastaError(message, hint=self._begin_again())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The weights moved. Stop if asked; log and evaluate the last step wherever it falls."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
        if self._interrupted:
            control.should_log = control.should_save = control.should_training_stop = True
        trained = (one for one in kwargs["model"].parameters() if one.requires_grad)
        if control.should_save and not all(bool(one.isfinite().all()) for one in trained):
            # The loss may be finite where its gradients overflow.
            message = f"weights are no longer numbers after step {state.global_step}"
            raise PastaError(message, hint=self._begin_again())
        if not control.should_log:
            self._tell(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Append one line: step, losses in nats per labelled token, learning rate, seconds.

        Tokens and seconds are those of all training that the file tells of, wherever it went on.
        """
        found = logs or {}
        if not {"loss", "eval_loss"} & set(found):
            return
        labels = {"loss": "loss", "eval_loss": "held out"}
        self._losses |= {label: found[name] for name, label in labels.items() if name in found}
        if "eval_loss" in found or not control.should_evaluate:
            self._tell(args, state)
        if state.is_world_process_zero:
            seconds = round(self._earlier_s + time.monotonic() - self._began_s, 1)
            tokens = self._tokens_until(args, state.global_step)
            line = {"step": state.global_step, **found, "tokens": tokens, "seconds": seconds}
            append_line(self._metrics, line)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Put `pasta.json` beside the weights, where the checkpoint holds an adapter."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        holds_adapter = (folder / "adapter_config.json").is_file()
        if self._checkpoint and state.is_world_process_zero and holds_adapter:
            checkpoints.save(self._checkpoint, folder)

    def _tokens_until(self, args: TrainingArguments, step: int) -> int:
        return sum(self._tokens[: step * args.gradient_accumulation_steps * args.world_size])

    def _tell(self, args: TrainingArguments, state: TrainerState) -> None:
        """Show steps, losses, pace, and the time that is left."""
        if not state.is_world_process_zero:
            return
        done = self._tokens_until(args, state.global_step)
        spent_s = max(time.monotonic() - self._began_s, 1e-9)
        pace = (done - self._tokens_until(args, self._first)) / spent_s
        words = [f"step {state.global_step}/{state.max_steps}"]
        words += [f"{label} {loss:.3f}" for label, loss in self._losses.items()]
        left = timedelta(seconds=round((sum(self._tokens) - done) / pace))
        words += [f"{pace:.0f} tokens/s", f"{left} left"]
        self._show(state.global_step, state.max_steps, ", ".join(words))
