"""JSONL files of a run folder: grown line by line, or written whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the settings of two runs that differ, or that only one of them has, in order."""
    return [name for name in {**there, **here} if there.get(name) != here.get(name)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file; none if there is no file yet.

    A last line without its line break was cut off by a kill or a full disk, and does not count.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_object(path, number, line) for number, line in enumerate(whole, start=1)]


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(line.decode("utf-8")))
    except (ValueError, TypeError) as error:
        raise PastaError(
            f"{path}:{number}: broken: {error}",
            hint="Remove the file; the same command makes it again.",
        ) from error


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a file whole or not at all."""
    write_text(path, "".join(encode_line(line) for line in lines))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def resume_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that is to grow on; a torn last one is cut away."""
    found = read_lines(path)
    write_lines(path, found)
    return found


def encode_line(line: dict[str, Any]) -> str:
    """Return one line, its line break included."""
    return json.dumps(line, ensure_ascii=False) + "\n"
