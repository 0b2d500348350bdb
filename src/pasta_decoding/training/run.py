"""The folder of a training run: its settings, its checkpoints, and what a full disk means."""

from __future__ import annotations

import json
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


def find_run(out: Path, config: DataclassInstance) -> Path | None:
    """Return the last whole checkpoint of this run in `out`. Refuses a folder of another run."""
    path = out / "config.json"
    if path.exists():
        _check_same(path, json.loads(_resolved(config)), _defaults(config))
    return last_checkpoint(out)


def refuse_other_inputs(out: Path, inputs: Mapping[str, Any]) -> None:
    """Raise PastaError if the run in `out` was begun with other rows or another base model.

    inputs: of what `begin_run` kept, those that are known by now. An older version kept none.
    """
    kept = read_lines(out / INPUTS)
    hint = "Choose another --out, or restore what it was begun with to resume it."
    for there in kept:
        known = {name: there.get(name) for name in inputs}
        refuse_other_settings(out, known, inputs, hint=hint)


def last_checkpoint(out: Path) -> Path | None:
    """Return the last checkpoint in `out` that was written to its end."""
    # The state is written last: where it is missing, or half there, saving was broken off.
    whole = [state.parent for state in out.glob("checkpoint-*/trainer_state.json") if _reads(state)]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def _check_same(path: Path, wanted: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise PastaError, naming what differs, unless the run of `path` has the settings `wanted`.

    A setting that an older version did not know has its default there.
    """
    try:
        found = defaults | dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"the settings of the run in {path} cannot be read: {error}"
        raise PastaError(message, hint="Choose another --out.") from error
    hint = "Choose another --out, or repeat its settings to resume it."
    refuse_other_settings(path.parent, found, wanted, hint=hint)


def _defaults(config: DataclassInstance) -> dict[str, Any]:
    """Return the settings' defaults, as JSON holds them."""
    known = {one.name: one.default for one in fields(config) if one.default is not MISSING}
    return dict(json.loads(json.dumps(known)))


def finish_run(out: Path, tokens: int, say: Callable[[str], None]) -> None:
    """Keep the figures of a run whose adapter is written, and say them.

    tokens: that it was shown, prompts included.
    """
    lines = read_lines(out / "metrics.jsonl")
    figures: dict[str, Any] = {"steps": 0, "tokens": tokens, "seconds": 0.0}
    for line in lines:
        figures |= {"steps": line["step"], "seconds": line["seconds"]}
        figures |= {name: one for name, one in line.items() if name.endswith("loss")}
    write_text(out / SUMMARY, json.dumps(figures, indent=2) + "\n")
    say(f"finished: {described(figures)}")


def finished_run(out: Path, say: Callable[[str], None]) -> bool:
    """Is the run in `out` finished? Say so, with its figures."""
    if not (out / "adapter" / FILE_NAME).is_file():
        return False
    figures: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # an older version kept none
        figures = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    say(f"this run is finished: {described(figures)}" if figures else "this run is finished")
    return True


def described(figures: dict[str, Any]) -> str:
    """Return the figures of a run for people."""
    names = {
        "text_loss": "text",
        "control_loss": "control tokens",
        "eval_text_loss": "held-out text",
        "eval_control_loss": "held-out control tokens",
    }
    losses = [f"{label} {figures[name]:.3f}" for name, label in names.items() if name in figures]
    work = f"{figures['steps']} steps, {figures['tokens']} tokens, {figures['seconds']:.0f} s"
    return f"{work}; last losses: {', '.join(losses)}" if losses else work


def _reads(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def begin_run(
    out: Path, config: DataclassInstance, inputs: Mapping[str, Any] | None = None
) -> None:
    """Create the run folder with the resolved settings in it, whole or not at all.

    inputs: digests of what the settings only name, such as rows; see `refuse_other_inputs`.
    """
    if inputs is not None and not (out / INPUTS).exists():
        write_lines(out / INPUTS, [dict(inputs)])
    write_text(out / "config.json", _resolved(config))


def _resolved(config: DataclassInstance) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn what a full disk or a closed folder raises into an error that says what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk is any of these, by who noticed it; torch names its writer's source file.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise PastaError(
            f"cannot write the run in {out}: {error}",
            hint="Make room there; the same command goes on from the last checkpoint.",
        ) from error
