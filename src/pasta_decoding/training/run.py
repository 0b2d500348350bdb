"""The folder of a training run: its lock, its settings, its checkpoints, its figures."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.data.lines import (
    read_lines,
    refuse_other_settings,
    write_lines,
    write_text,
)
from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import FILE_NAME

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SUMMARY = "summary.json"
INPUTS = "inputs.json"
_LOSSES = {
    "text_loss": "text",
    "control_loss": "control tokens",
    "eval_text_loss": "held-out text",
    "eval_control_loss": "held-out control tokens",
}


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Hold the run folder as long as the context is open, and name what a full disk raises.

    Raises PastaError if another process trains there. Of processes that were launched together
    the main one holds it.
    """
    from safetensors import SafetensorError

    if os.environ.get("RANK", "0") != "0":
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PastaError(f"another process trains in {out}") from None
            yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk is any of these, by who noticed it; torch names its writer's source file.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise PastaError(
            f"cannot write the run in {out}: {error}",
            hint="Make room there; the same command goes on from the last checkpoint.",
        ) from error


def find_run(out: Path, config: DataclassInstance) -> Path | None:
    """Return the last whole checkpoint of this run in `out`. Refuses a folder of another run.

    A setting that an older version did not know has its default there.
    """
    path = out / "config.json"
    if path.exists():
        known = {one.name: one.default for one in fields(config) if one.default is not MISSING}
        try:
            found = _as_json(known) | dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise PastaError(
                f"the settings of the run in {path} cannot be read: {error}"
            ) from error
        hint = "Choose another --out, or repeat its settings to resume it."
        refuse_other_settings(out, found, asdict(config), hint=hint)
    return last_checkpoint(out)


def refuse_other_inputs(out: Path, inputs: Mapping[str, Any]) -> None:
    """Raise PastaError if the run in `out` was begun with other rows or another base model.

    inputs: of what `begin_run` kept, those that are known by now. An older version kept none.
    """
    hint = "Choose another --out, or restore what it was begun with to resume it."
    for there in read_lines(out / INPUTS):
        known = {name: there.get(name) for name in inputs}
        refuse_other_settings(out, known, inputs, hint=hint)


def last_checkpoint(out: Path) -> Path | None:
    """Return the last checkpoint in `out` that was written to its end."""
    # The state is written last: where it is missing, or half there, saving was broken off.
    whole = [state.parent for state in out.glob("checkpoint-*/trainer_state.json") if _reads(state)]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def begin_run(
    out: Path, config: DataclassInstance, inputs: Mapping[str, Any] | None = None
) -> None:
    """Write the resolved settings into the run folder, whole or not at all.

    inputs: digests of what the settings only name, such as rows; see `refuse_other_inputs`.
    """
    if inputs is not None and not (out / INPUTS).exists():
        write_lines(out / INPUTS, [dict(inputs)])
    write_text(out / "config.json", json.dumps(asdict(config), indent=2) + "\n")


def finish_run(out: Path, tokens: int, say: Callable[[str], None]) -> None:
    """Keep the figures of a run whose adapter is written, and say them.

    tokens: that it was shown, prompts included.
    """
    figures: dict[str, Any] = {"steps": 0, "tokens": tokens, "seconds": 0.0}
    for line in read_lines(out / "metrics.jsonl"):
        figures |= {"steps": line["step"], "seconds": line["seconds"]}
        figures |= {name: one for name, one in line.items() if name.endswith("loss")}
    write_text(out / SUMMARY, json.dumps(figures, indent=2) + "\n")
    plot_losses(out)
    say(f"finished: {_described(figures)}")


def finished_run(out: Path, say: Callable[[str], None]) -> bool:
    """Is the run in `out` finished? Say so, with its figures."""
    if not (out / "adapter" / FILE_NAME).is_file():
        return False
    figures: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # an older version kept none
        figures = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    say(f"this run is finished: {_described(figures)}" if figures else "this run is finished")
    return True


def plot_losses(out: Path) -> None:
    """Draw text and control loss over the steps, and of held-out rows if there are any."""
    from matplotlib.figure import Figure

    lines = read_lines(out / "metrics.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimiser step", ylabel="nats per labelled token")
    for name, label in _LOSSES.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend()
    figure.savefig(out / "loss.png", dpi=120)


def _described(figures: dict[str, Any]) -> str:
    losses = [f"{label} {figures[name]:.3f}" for name, label in _LOSSES.items() if name in figures]
    work = f"{figures['steps']} steps, {figures['tokens']} tokens, {figures['seconds']:.0f} s"
    return f"{work}; last losses: {', '.join(losses)}" if losses else work


def _reads(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
