"""What Pasta keeps in the user's cache: the model, exported and compiled files, what broke off."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.models.bases import DEFAULT_MODEL, MANIFEST

STALE_S = 24 * 3600
"""Scratch folders this old belong to nobody who is still at work."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One thing in the cache.

    name:     its path there.
    what:     "model", "export", "compiled" or "scratch".
    used_s:   when it was last read, where the file system tells, else written (epoch).
    """

    name: str
    path: Path
    what: str
    size_bytes: int
    used_s: float


def kept(cache: Path) -> list[Kept]:
    """Return what is there and ours, the largest first; other files in the folder are not named."""
    scratch = [*cache.glob(".pull-*"), *cache.glob("gguf/.export-*")]
    scratch += [path for path in cache.glob("compiled/.*") if path.is_dir()]
    exports = cache.glob("gguf/*.gguf")
    model = [cache / DEFAULT_MODEL] if (cache / DEFAULT_MODEL / MANIFEST).is_file() else []
    found = [
        _kept(cache, path, what)
        for what, paths in (
            ("model", model),
            ("export", exports),
            ("compiled", cache.glob("compiled/*.pt2")),
            ("scratch", scratch),
        )
        for path in paths
    ]
    return sorted(found, key=lambda one: (-one.size_bytes, one.name))


def is_spare(one: Kept, *, now_s: float | None = None) -> bool:
    """Is it made again by itself, or of use to nobody?"""
    now_s = time.time() if now_s is None else now_s
    return one.what == "export" or (one.what == "scratch" and now_s - one.used_s > STALE_S)


def remove(one: Kept) -> None:
    """Take it out of the cache, a compiled model with what is told of it."""
    if one.path.is_dir():
        shutil.rmtree(one.path)
        return
    one.path.unlink()
    if one.what == "compiled":
        for beside in (".json", ".lock"):
            one.path.with_suffix(beside).unlink(missing_ok=True)


def _kept(cache: Path, path: Path, what: str) -> Kept:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    states = [file.stat() for file in files] or [path.stat()]
    return Kept(
        name=str(path.relative_to(cache)),
        path=path,
        what=what,
        size_bytes=sum(state.st_size for state in states),
        used_s=max(max(state.st_atime, state.st_mtime) for state in states),
    )
