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
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

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

if TYPE_CHECKING:
    from pasta_decoding.training.config import PreferenceConfig, SftConfig

GOES_ON = "the same command goes on"
_MEMORY = 0.95  # of the running mean of the losses: about twenty packs
_EVERY_RUN: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "prediction_loss_only": True,
    "dataloader_pin_memory": False,  # block masks are made where they are needed
    "ddp_find_unused_parameters": False,
    "logging_nan_inf_filter": False,  # `RunCallback` stops instead
    "save_total_limit": 2,
    "disable_tqdm": True,  # `RunCallback` tells more
}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. Tokens are those of all processes, prompts included.

    loss:         running mean over the last packs (nats a labelled token); None before the first.
    held_out:     the last loss on held-out rows; None if there was none.
    tokens_per_s: since this process began.
    left_s:       seconds that the rest will take at this pace; None before the first pack.
    """

    step: int
    steps: int
    tokens: int
    all_tokens: int
    loss: float | None
    held_out: float | None
    tokens_per_s: float
    left_s: float | None


Show = Callable[[Progress], None]
Draw = Callable[[str], AbstractContextManager[Show]]
"""Takes what is being done; as long as the context is open, what it hands out draws it."""


class Meter(Protocol):
    """Collects figures of its own between two log steps. `last`: the loss of the last batch.

    finite: whether every loss so far was a number.
    """

    last: float | None
    finite: bool

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return what was collected, and start anew; processes talk through `device`."""
        ...


def training_arguments(
    out: Path, config: SftConfig | PreferenceConfig, batches_per_step: int, **settings: Any
) -> TrainingArguments:
    """Return the Trainer's settings: those of `config`, of every run, and `settings`.

    Making them joins the processes that were launched together. That comes before the model is
    loaded: where it will be sharded, loading must know.
    """
    from accelerate import PartialState

    use_cpu = not torch.cuda.is_available()
    processes = PartialState(cpu=use_cpu).num_processes
    if batches_per_step % processes:
        raise PastaError(
            f"{batches_per_step} packs a step cannot be shared by {processes} processes",
            hint=f"Give --packs-per-step a multiple of {processes}.",
        )
    arguments = TrainingArguments(
        output_dir=str(out),
        gradient_accumulation_steps=batches_per_step // processes,
        use_cpu=use_cpu,
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        save_steps=config.save_every_steps,
        **_EVERY_RUN,
        **settings,
    )
    if arguments.n_gpu > 1:
        raise PastaError(
            f"one process sees {arguments.n_gpu} GPUs",
            hint="CUDA_VISIBLE_DEVICES=0, or accelerate launch -m pasta_decoding train sft ...",
        )
    return arguments


def set_attention(model: Any, wanted: str, *, on_gpu: bool) -> str:
    """Let `model` compute the attention that is `wanted`, and say which that is.

    wanted: "flex" with block masks, "dense" masks, or "auto": flex on a GPU.
    """
    if wanted == "dense" or (wanted == "auto" and not on_gpu):
        return f"{model.config.get_text_config()._attn_implementation}, with dense masks"
    if not on_gpu:
        raise PastaError("flex attention has no backward pass on a CPU: leave --attention out")
    model.set_attn_implementation("flex_attention")
    return "flex, with block masks"


def recompute_activations(model: Any) -> None:
    """Compute activations again on the way back instead of keeping them."""
    # transformers 5.23 renames it, and warns of the only name that 5.17 knows.
    older, newer = "gradient_checkpointing_enable", "activation_checkpointing_enable"
    getattr(model, newer if hasattr(model, newer) else older)({"use_reentrant": False})


class MeteredTrainer(Trainer):
    """The Trainer, which logs what a meter collected, too: to files and to whom it reports."""

    def __init__(self, meter: Meter, **settings: Any) -> None:
        super().__init__(**settings)
        # Its own would print each line of logs to standard output.
        self.remove_callback(PrinterCallback)
        self.meter = meter

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Add the meter's figures to a line of losses. Takes all processes."""
        if "loss" in logs:
            logs = {**logs, **self.meter.read(self.args.device), "loss": logs["loss"]}
        super().log(logs, *arguments)


class RunCallback(TrainerCallback):
    """Watches one run. Use it as a context around training.

    The first Ctrl-C becomes a checkpoint behind the step, and leaving the context raises
    KeyboardInterrupt then; the second one stops at once. Several processes would not stop at the
    same step, so each of those stops at once.

    batch_tokens: of each batch of the whole run, in order.
    begin_again:  says what to do where the numbers went wrong.
    checkpoint:   is kept beside the weights of each checkpoint, so that it can be decoded with.
    interrupted:  whether there was a Ctrl-C. Behind the last step it stops nothing: see to it.
    """

    def __init__(
        self,
        meter: Meter,
        batch_tokens: Sequence[int],
        *,
        out: Path,
        say: Callable[[str], None],
        show: Show,
        begin_again: Callable[[], str],
        checkpoint: Checkpoint | None = None,
        processes: int = 1,
    ) -> None:
        self._meter, self._say, self._show = meter, say, show
        self._metrics, self._begin_again, self._checkpoint = (
            out / "metrics.jsonl",
            begin_again,
            checkpoint,
        )
        self._until = [0, *accumulate(batch_tokens)]
        self._batches = self._first = 0
        self._loss = self._weight = 0.0
        self._held_out: float | None = None
        self._began_s = time.monotonic()
        self._earlier_s = 0.0
        self._alone = processes == 1
        self.interrupted = self._stopped = False
        self._handler: Any = None

    def __enter__(self) -> RunCallback:
        here = threading.current_thread() is threading.main_thread()
        if here and self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._stopped and exception[0] is None:
            raise KeyboardInterrupt(GOES_ON)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt(GOES_ON)
        self.interrupted = True
        self._say("stopping behind this step; Ctrl-C again stops at once")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Cut the metrics back to the step from which training goes on; start the clock."""
        self._began_s = time.monotonic()
        if state.is_world_process_zero:
            kept = [one for one in read_lines(self._metrics) if one["step"] <= state.global_step]
            write_lines(self._metrics, kept)
            self._earlier_s = kept[-1]["seconds"] if kept else 0.0
        self._batches = self._first = self._at(state.global_step * _per_step(args))
        self._tell(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Look at the losses whose gradients are about to move the weights."""
        if not self._meter.finite:
            message = f"the loss is not a number at step {state.global_step + 1}"
            raise PastaError(message, hint=self._begin_again())

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """A batch of a step was computed, by every process."""
        self._note_loss()
        self._batches = self._at(self._batches + args.world_size)
        self._tell(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The weights moved. Stop if asked; log and evaluate the last step wherever it falls."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
        elif self.interrupted:
            self._stopped = True
            control.should_log = control.should_save = control.should_training_stop = True
        trained = (one for one in kwargs["model"].parameters() if one.requires_grad)
        if control.should_save and not all(bool(one.isfinite().all()) for one in trained):
            # Gradients overflow, too.
            message = f"weights are no longer numbers after step {state.global_step}"
            raise PastaError(message, hint=self._begin_again())
        self._note_loss()
        self._batches = self._at(state.global_step * _per_step(args))
        self._tell(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Append one line: step, losses in nats per labelled token, learning rate, seconds.

        Seconds are those of all training that the file tells of, wherever it went on.
        Of an evaluation on held-out rows only its losses are kept.
        """
        found = logs or {}
        if "eval_loss" in found:
            found = {name: one for name, one in found.items() if name.endswith("_loss")}
            self._held_out = float(found["eval_loss"])
            self._tell(state)
        elif "loss" not in found:
            return
        if state.is_world_process_zero:
            seconds = round(self._earlier_s + time.monotonic() - self._began_s, 1)
            line = {"step": state.global_step, **found, "seconds": seconds}
            append_line(self._metrics, line)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Put `pasta.json` beside the weights, where the checkpoint holds an adapter."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        holds_adapter = (folder / "adapter_config.json").is_file()
        if self._checkpoint and state.is_world_process_zero and holds_adapter:
            checkpoints.save(self._checkpoint, folder)

    def _at(self, batches: int) -> int:
        return min(batches, len(self._until) - 1)

    def _note_loss(self) -> None:
        if self._meter.last is not None:
            self._loss = _MEMORY * self._loss + (1 - _MEMORY) * self._meter.last
            self._weight = _MEMORY * self._weight + 1 - _MEMORY

    def _tell(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        tokens, everything = self._until[self._batches], self._until[-1]
        pace = (tokens - self._until[self._first]) / max(time.monotonic() - self._began_s, 1e-9)
        self._show(
            Progress(
                step=state.global_step,
                steps=state.max_steps,
                tokens=tokens,
                all_tokens=everything,
                loss=self._loss / self._weight if self._weight else None,
                held_out=self._held_out,
                tokens_per_s=pace,
                left_s=(everything - tokens) / pace if pace else None,
            )
        )


def _per_step(args: TrainingArguments) -> int:
    return args.gradient_accumulation_steps * args.world_size
