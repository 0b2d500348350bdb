"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Hand out where to write; that takes the name `path` once the block has ended well.

    Until then, and after a failure, what was at `path` stays. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def copy_whole(folder: Path, target: Path) -> None:
    """Copy a folder to where it replaces an older one, whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
