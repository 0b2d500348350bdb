"""How far a run is, for whoever draws it; and a way to stop one behind a step, not within.

Progress is counted in tokens, forward pass by forward pass: on a processor a step takes a while.
"""

# ruff: noqa: ARG002 (callbacks have the Trainer's signatures)
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pasta_decoding.training.metrics import Meter

GOES_ON = "the same command goes on"
_MEMORY = 0.95  # of the running mean of the losses: about twenty packs


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


def undrawn(_doing: str) -> AbstractContextManager[Show]:
    """Draw nothing."""
    return nullcontext(lambda _progress: None)


@dataclass(frozen=True, slots=True)
class Watching:
    """Who hears how a run goes: line by line, and pass by pass."""

    say: Callable[[str], None]
    show: Show


class ProgressReport(TrainerCallback):
    """Tells `show` behind every forward pass, on the main process.

    batch_tokens: of each batch of the whole run, in order.
    """

    def __init__(self, meter: Meter, batch_tokens: Sequence[int], show: Show) -> None:
        self._meter = meter
        self._until = [0, *accumulate(batch_tokens)]
        self._show = show
        self._batches = self._first = 0
        self._loss = self._weight = 0.0
        self._held_out: float | None = None
        self._began_s = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Start the clock where training goes on."""
        self._began_s = time.monotonic()
        self._batches = self._first = self._at(state.global_step * _per_step(args))
        self._tell(state)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """A batch of a step was computed, by every process."""
        self._note_loss()
        self._batches = self._at(self._batches + args.world_size)
        self._tell(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """The last batch of a step was, and the weights moved."""
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
        """Take note of a loss on held-out rows."""
        if "eval_loss" in (logs or {}):
            self._held_out = float((logs or {})["eval_loss"])
            self._tell(state)

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


class StopBehindStep(TrainerCallback):
    """Turns the first Ctrl-C into a checkpoint behind the step; the second one stops at once.

    Use it as a context around training: leaving it raises KeyboardInterrupt if it stopped a run.
    Several processes would not stop at the same step, so each of those stops at once.

    asked: whether there was a Ctrl-C. Behind the last step it stops nothing: see to it.
    """

    def __init__(self, say: Callable[[str], None], *, processes: int) -> None:
        self._say = say
        self._alone = processes == 1
        self.asked = self._stopped = False
        self._before: Any = None

    def __enter__(self) -> StopBehindStep:
        here = threading.current_thread() is threading.main_thread()
        if here and self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._stopped and exception[0] is None:
            raise KeyboardInterrupt(GOES_ON)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt(GOES_ON)
        self.asked = True
        self._say("stopping behind this step; Ctrl-C again stops at once")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Have everything kept, unless the run is over anyway."""
        if self.asked and state.global_step < state.max_steps:
            self._stopped = True
            control.should_log = control.should_save = control.should_training_stop = True
