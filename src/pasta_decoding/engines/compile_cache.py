"""Compiled models on disk. They are code, so they are only read where nobody else can write.

A manifest (NAME.json) names the file, its digest and what it was made for. It is replaced last, by
one rename, so what it names is always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pasta_decoding.errors import PastaError

AGAIN = "Make it again: pasta compile."

Tell = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a compiled model works with: it is of no use to any other.

    format:    of the program, as this package makes it.
    processor: its name and what it can do.
    threads:   of the processor, that every product is split between.
    """

    format: int
    torch: str
    processor: str
    threads: int


def this_origin(program_format: int) -> Origin:
    """Return what is compiled for in this process."""
    import torch

    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    # The sizes of its caches and its cores change with the virtual machine, not with the code.
    able = sorted(name for name, value in found.items() if value is True)
    name = str(found.get("cpu_name", "processor"))
    digest = hashlib.sha256(" ".join(able).encode()).hexdigest()[:8]
    return Origin(program_format, torch.__version__, f"{name} {digest}", torch.get_num_threads())


def is_there(folder: Path, name: str) -> bool:
    """Has anything been compiled under this name?"""
    return _manifest(folder, name).exists()


def find(folder: Path, name: str, origin: Origin) -> Path:
    """Return the file of a compiled model that is whole, ours and made for `origin`.

    Raises PastaError, with what is wrong in one sentence, where there is none.
    """
    manifest = _manifest(folder, name)
    if not manifest.exists():
        raise PastaError(f"{name} is not compiled yet", hint="Do it once: pasta compile.")
    check_private(folder)
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        path, digest, made_for = (
            folder / Path(told["file"]).name,
            told["sha256"],
            dict(told["origin"]),
        )
        for path_ in (manifest, path):
            check_private(path_)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PastaError(f"the compiled model {name} is damaged", hint=AGAIN) from error
    for what, ours in asdict(origin).items():
        if made_for.get(what) != ours:
            theirs = made_for.get(what)
            message = f"the compiled model {name} is for another {what} ({theirs}; here: {ours})"
            raise PastaError(message, hint=AGAIN)
    if found != digest:
        raise PastaError(f"the compiled model {name} was changed on disk", hint=AGAIN)
    return path


def check_private(path: Path) -> None:
    """Raise PastaError if anybody but the user could have written here."""
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PastaError(
            f"{path} may be written by others, so no compiled code is loaded from there",
            hint=f"Make it yours alone: chmod go-w {path}",
        )


def make(
    folder: Path,
    name: str,
    origin: Origin,
    compile_to: Callable[[Path, Path], None],
    *,
    tell: Tell,
) -> Path:
    """Compile unless it is there already, and return the file. One process at a time does.

    compile_to: writes the file that it is given, and whatever else into the folder given with it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        with _locked(folder / f"{name}.lock", tell):
            try:
                return find(folder, name, origin)
            except PastaError:
                return _make(folder, name, origin, compile_to)
    except OSError as error:
        raise PastaError(
            f"cannot write the compiled model to {folder}: {error.strerror or error}",
            hint="Make room there, or name another folder (PASTA_CACHE).",
        ) from error


def _make(
    folder: Path, name: str, origin: Origin, compile_to: Callable[[Path, Path], None]
) -> Path:
    for left in folder.glob(f".{name}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-"))
    try:
        made = scratch / "model.pt2"
        compile_to(made, scratch)
        with made.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = folder / f"{name}-{digest[:12]}.pt2"
        manifest = {"file": path.name, "sha256": digest, "origin": asdict(origin)}
        written = scratch / "manifest.json"
        written.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for one in (made, written):
            one.chmod(0o600)
        made.replace(path)
        written.replace(_manifest(folder, name))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in folder.glob(f"{name}-*.pt2"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


@contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """Hold a lock that ends with the process, whatever ends it."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is compiling the same: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _manifest(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
