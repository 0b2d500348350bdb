"""Files of a run folder: JSONL, grown line by line or written whole, and JSON."""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import to_json, write_text

JsonValue = TypeVar("JsonValue", list[Any], dict[str, Any])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run folder and hold it. Raises PastaError if another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PastaError(f"another process writes into {folder}") from None
        yield


def refuse_other_settings(
    place: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, hint: str
) -> None:
    """Raise PastaError that names the differences, unless `place` was begun with settings `here`.

    there: all that is known of it, as JSON holds it.
    """
    here = json.loads(json.dumps(dict(here)))
    if names := [name for name in here if there.get(name) != here[name]]:
        changes = ", ".join(f"{name} ({there.get(name)} -> {here[name]})" for name in names)
        raise PastaError(f"{place} was begun with other settings: {changes}", hint=hint)


def read_lines(
    path: Path,
    *,
    resume: bool = False,
    hint: str = "Remove the file; the same command makes it again.",
) -> list[dict[str, Any]]:
    """Return the object in each line; nothing if there is no file yet.

    A last line without its line break was cut off by a kill or a full disk, and does not count.
    resume: the file is to grow on, so such a line is cut away.

    Raises PastaError for a line that is no object, and leaves the file alone then.
    """
    contents = path.read_bytes() if path.exists() else b""
    *whole, torn = contents.split(b"\n")
    found = []
    for number, line in enumerate(whole, start=1):
        try:
            found.append(dict(json.loads(line.decode("utf-8"))))
        except (ValueError, TypeError, RecursionError) as error:
            raise PastaError(f"{path}:{number}: not a JSON object: {error}", hint=hint) from error
    if resume and torn:
        write_text(path, contents[: len(contents) - len(torn)].decode("utf-8"))
    return found


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line; when this returns, a kill cannot lose it any more. The file's folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(to_json(line) + "\n")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(to_json(line) + "\n" for line in lines))


def read_json(path: Path, kind: type[JsonValue]) -> JsonValue:
    """Return the JSON value of a file. Raises PastaError if it cannot be read or is no `kind`."""
    with errors_as(f"cannot read {path}", OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, kind):
        raise PastaError(f"{path} holds no JSON {kind.__name__}")
    return found
