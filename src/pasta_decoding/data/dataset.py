"""Instruction-response rows as JSONL, plain or gzip-compressed by their name's suffix.

One JSON object a line: `id`, `source`, `instruction`, `response`; further keys are kept as
they are. Files are written whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pasta_decoding.errors import PastaError

_FIELDS = ("id", "source", "instruction", "response")


@dataclass(frozen=True, slots=True)
class Row:
    """One answered instruction. `response` may hold tags in text form.

    extra: keys of the file that have no field here, written back unchanged.
    """

    id: str
    source: str
    instruction: str
    response: str
    extra: dict[str, object] = field(default_factory=dict)


def read_rows(
    path: Path, *, on_problem: Callable[[PastaError], None] | None = None
) -> Iterator[Row]:
    """Yield the rows of `path` in order; blank lines are skipped.

    A broken line raises a PastaError that names file and line. With `on_problem` it is
    reported there instead and the rest is kept; an unreadable file raises all the same.
    """
    seen: set[str] = set()
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = _read_row(line, seen)
        except PastaError as problem:
            located = PastaError(f"{path}:{number}: {problem}", hint=problem.hint)
            if on_problem is None:
                raise located from problem
            on_problem(located)
        else:
            seen.add(row.id)
            yield row


def is_held_out(row_id: str) -> bool:
    """Does a row belong to the quarter that is for judging: never trained or tuned on?"""
    return int(hashlib.sha256(row_id.encode()).hexdigest(), 16) % 4 == 0


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the JSON object of every line that is not blank, with the line's number from 1."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                yield number, _read_object(line)
            except PastaError as problem:
                raise PastaError(f"{path}:{number}: {problem}", hint=problem.hint) from problem


def read_prompts(path: Path) -> list[str]:
    """Return the `instruction` of every line of a JSONL file; other keys may be missing."""
    prompts = []
    for number, found in read_objects(path):
        try:
            prompts.append(_text(found, "instruction"))
        except PastaError as problem:
            raise PastaError(f"{path}:{number}: {problem}", hint=problem.hint) from problem
    return prompts


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write `rows` to `path` and return their number; until all are written `path` is untouched."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            count = _write(file, rows, compressed=path.suffix == ".gz")
        partial.replace(path)
    except OSError as error:
        raise _cannot("write", path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return count


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked if its name ends in .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot("read", path, error) from error


def _read_row(line: bytes, seen: set[str]) -> Row:
    found = _read_object(line)
    texts = {name: _text(found, name) for name in _FIELDS}
    if not texts["id"]:
        raise PastaError("the id is empty")
    if texts["id"] in seen:
        raise PastaError(f"id {texts['id']!r} was used before", hint="give every row its own id")
    return Row(**texts, extra={key: found[key] for key in found if key not in _FIELDS})


def _read_object(line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PastaError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise PastaError(f"not JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise PastaError("not JSON that can be read: too deep, or a number too long") from error
    if not isinstance(found, dict):
        raise PastaError("not a JSON object")
    return found


def _text(found: dict[str, object], name: str) -> str:
    if name == "source" and found.get(name) is None:
        return ""
    if name not in found:
        raise PastaError(f"no {name!r}", hint=f"every row needs {', '.join(map(repr, _FIELDS))}")
    value = found[name]
    if not isinstance(value, str):
        raise PastaError(f"{name!r} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PastaError(f"{name!r} holds half a surrogate pair") from error
    return value


def _write(file: IO[bytes], rows: Iterable[Row], *, compressed: bool) -> int:
    """Write the rows; no name and time go into a gzip header, so equal rows give equal bytes."""
    if compressed:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            return _write_lines(packed, rows)
    return _write_lines(file, rows)


def _write_lines(file: IO[bytes] | gzip.GzipFile, rows: Iterable[Row]) -> int:
    count = 0
    for row in rows:
        file.write(encode_row(row) + b"\n")
        count += 1
    return count


def encode_row(row: Row) -> bytes:
    """Return the line of a row, without its line break."""
    found = {name: getattr(row, name) for name in _FIELDS} | row.extra
    try:
        return json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        return json.dumps(found).encode("utf-8")


def _cannot(verb: str, path: Path, error: Exception) -> PastaError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return PastaError(f"cannot {verb} {path}: {reason}")
