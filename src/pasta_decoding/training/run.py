"""The folder of a training run: its settings, its checkpoints, and what a full disk means."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def find_run(out: Path, config: DataclassInstance) -> Path | None:
    """Return the last whole checkpoint of this run in `out`. Refuses a folder of another run."""
    path = out / "config.json"
    if path.exists():
        _check_same(path, json.loads(_resolved(config)))
    return last_checkpoint(out)


def last_checkpoint(out: Path) -> Path | None:
    """Return the last checkpoint in `out` that was written to its end."""
    # The state is written last: where it is missing, or half there, saving was broken off.
    whole = [state.parent for state in out.glob("checkpoint-*/trainer_state.json") if _reads(state)]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def _check_same(path: Path, wanted: dict[str, Any]) -> None:
    """Raise PastaError, naming what differs, unless the run of `path` has the settings `wanted`."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"the settings of the run in {path} cannot be read: {error}"
        raise PastaError(message, hint="Choose another --out.") from error
    different = [
        f"{key} is {found.get(key)!r} there, {wanted.get(key)!r} here"
        for key in wanted | found
        if found.get(key) != wanted.get(key)
    ]
    if different:
        raise PastaError(
            f"{path.parent} holds a run with other settings: {'; '.join(different)}",
            hint="Choose another --out, or repeat its settings to resume it.",
        )


def _reads(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def begin_run(out: Path, config: DataclassInstance) -> None:
    """Create the run folder with the resolved settings in it, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "config.json.partial"
    partial.write_text(_resolved(config), encoding="utf-8")
    os.replace(partial, out / "config.json")


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
