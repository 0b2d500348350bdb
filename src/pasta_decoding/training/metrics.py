"""What a training run leaves to look at: one JSON line a log step, and a plot of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

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


class Meter(Protocol):
    """Collects figures of its own between two log steps. `last`: the loss of the last batch.

    finite: whether every loss so far was a number.
    """

    last: float | None
    finite: bool

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return what was collected, and start anew; processes talk through `device`."""
        ...


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
            logs |= self.meter.read(self.args.device)
        super().log(logs, *arguments)


class MetricsFile(TrainerCallback):
    """Appends what the Trainer logs; a resumed run first drops the lines past its checkpoint.

    Only the main process writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.monotonic()

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 (the Trainer's signature)
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Cut the file back to the step from which training goes on."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_lines(self._path) if line["step"] <= state.global_step]
        write_lines(self._path, kept)
        if kept:
            self._began_s -= kept[-1]["seconds"]

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 (the Trainer's signature)
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Append one line: step, losses in nats per labelled token, learning rate, seconds.

        Seconds are those of all training that the file tells of, wherever it went on.

        Of an evaluation on held-out rows only its losses are kept.
        """
        found = logs or {}
        if "eval_loss" in found:
            found = {name: one for name, one in found.items() if name.endswith("_loss")}
        elif "loss" not in found:
            return
        seconds = round(time.monotonic() - self._began_s, 1)
        line = {"step": state.global_step, **found, "seconds": seconds}
        if not state.is_world_process_zero:
            return
        append_line(self._path, line)


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw text and control loss over the steps, and of held-out rows if there are any."""
    from matplotlib.figure import Figure

    lines = read_lines(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimiser step", ylabel="nats per labelled token")
    for name, label in (
        ("text_loss", "text"),
        ("control_loss", "control tokens"),
        ("eval_text_loss", "text, held out"),
        ("eval_control_loss", "control tokens, held out"),
    ):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
