"""The model that Pasta works with out of the box: SmolLM2-135M-Instruct (Apache-2.0).

`pasta pull` puts it into the user's cache: a folder in Hugging Face form with a manifest of its
files in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pasta_decoding.errors import PastaError
from pasta_decoding.models.download import sha256

DEFAULT_MODEL = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
# Raised when the converted form changes, so that an older cache is made anew.
FORMAT = 2


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache: PASTA_CACHE, or `pasta-decoding` where caches live."""
    if chosen := environment.get("PASTA_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pasta-decoding"


def model_dir(cache: Path) -> Path:
    """Return the folder of the default model; a missing or broken one is a `PastaError`.

    Quick: the weights are checked by size only (`pull` checks their contents).
    """
    folder = cache / DEFAULT_MODEL
    if not folder.exists():
        raise PastaError(f"the default model is not in {cache}", hint="run `pasta pull`")
    if defect := defect_of(folder, thorough=False):
        raise PastaError(
            f"the default model in {folder} is broken: {defect}",
            hint="run `pasta pull` to make it anew",
        )
    return folder


def defect_of(folder: Path, *, thorough: bool) -> str | None:
    """Say what is wrong with a converted model, or None. Weights are hashed if `thorough`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            return f"it is of format {manifest['format']}, not {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, stated in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != stated["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {stated['bytes']}"
        if (thorough or path.suffix != ".safetensors") and sha256(path) != stated["sha256"]:
            return f"{name} has other contents than when it was written"
    return None
