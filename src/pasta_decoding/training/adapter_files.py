"""The files of an adapter, read and written as they are: tensors, peft's settings, our record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.models.checkpoint import Checkpoint, save

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's settings of peft. Raises PastaError."""
    path = folder / CONFIG
    if not path.is_file():
        raise PastaError(f"{folder} holds no {CONFIG}", hint="Give an adapter, not a whole model.")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PastaError(f"{path} cannot be read: {error}") from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by name. Raises PastaError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise PastaError(f"{folder} holds no {WEIGHTS}", hint="Give the folder of an adapter.")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise PastaError(f"{path} cannot be read: {error}") from error


def refuse_existing(out: Path) -> None:
    """Raise PastaError if there is something where an adapter is to be written."""
    if out.exists():
        raise PastaError(f"{out} exists already", hint="Choose another --out.")


def write_adapter(
    out: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
) -> Path:
    """Write an adapter to the folder `out`, whole or not at all, and return it.

    Raises PastaError where there is no room.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with written_whole(out) as partial:
            partial.mkdir(parents=True)
            save_file(dict(tensors), partial / WEIGHTS, metadata={"format": "pt"})
            (partial / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
            save(checkpoint, partial)
    except SafetensorError as error:
        raise PastaError(f"cannot write {out}: {error}") from error
    return out
