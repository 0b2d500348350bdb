"""Files and folders that are written completely or not at all, and folders of caches."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any
from uuid import uuid4

# One temporary folder for the process, removed when it ends.
scratch = cache(partial(TemporaryDirectory, prefix="pasta-"))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or a folder to; when the block succeeds, it moves to `path`.

    Until then, and after a failure, `path` is unchanged. If it is a link, the target is replaced.
    What writers of the same target left behind when they were killed is removed. What the block
    writes beside the yielded path goes when it ends. Raises OSError, also for a device or a pipe.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is neither a file nor a folder", str(path))
    # Two containers on one disk may have the same process number.
    folder = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    with _locked(path.parent):  # so that no other writer takes the folder for one left behind
        _remove_abandoned(path)
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        _try_lock(lock)
    partial = folder / path.name
    try:
        yield partial
        sync(partial)
        if partial.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
        _sync_one(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sync(path: Path) -> None:
    """Put a file, or all of a folder, onto the disk: after a power loss it is there whole."""
    for file in (*path.rglob("*"), path):
        _sync_one(file)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # not every disk can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers of `path` left: they no longer hold its lock."""
    for abandoned in path.parent.glob(f".{escape(path.name)}.*.partial"):
        with suppress(OSError):
            lock = os.open(abandoned, os.O_RDONLY)
            if _try_lock(lock):
                shutil.rmtree(abandoned, ignore_errors=True)
                abandoned.unlink(missing_ok=True)  # a file, as earlier versions left
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; False if it is locked, or cannot be."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, where its disk has locks."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that UTF-8 can encode: if it has a lone surrogate, in ASCII."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def copy_whole(folder: Path, target: Path) -> None:
    with written_whole(target) as partial:
        shutil.copytree(folder, partial)


def writable(folder: Path, what: str) -> Path:
    """Return `folder`. If it is not writable, log a warning and return a temporary one.

    what: the content of the cache, for the warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log = logging.getLogger("pasta_decoding")
        log.warning("%s cannot be kept in %s: %s", what, folder, error.strerror or error)
        return Path(scratch().name)


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
