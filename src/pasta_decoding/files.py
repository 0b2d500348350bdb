"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Hand out where to write a file or a folder, which is `path` once the block has ended well.

    Until then, and after a failure, what was at `path` stays. What a link leads to is written; a
    device or a pipe is not. Raises OSError.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is neither a file nor a folder", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if partial.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()
        shutil.rmtree(partial, ignore_errors=True)


def copy_whole(folder: Path, target: Path) -> None:
    """Copy a folder to where it replaces an older one, whole or not at all."""
    with written_whole(target) as partial:
        shutil.copytree(folder, partial)


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
