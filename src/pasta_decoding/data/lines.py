"""Files of a run folder: JSON, and JSON lines that are appended or written at once."""

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
    """Make a run folder and lock it. Raises PastaError if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PastaError(f"another process writes into {folder}") from None
        yield


def refuse_other_settings(
    path: Path, stored: Mapping[str, Any], current: Mapping[str, Any], *, hint: str
) -> None:
    """Raise PastaError, which names the differences, unless `stored` has the `current` settings.

    stored: settings that were read from `path` as JSON; it may have more keys.
    """
    current = json.loads(json.dumps(dict(current)))
    changes = [
        f"{name} ({stored.get(name)} -> {value})"
        for name, value in current.items()
        if stored.get(name) != value
    ]
    if changes:
        raise PastaError(f"{path} was begun with other settings: {', '.join(changes)}", hint=hint)


def read_lines(
    path: Path,
    *,
    resume: bool = False,
    hint: str = "Remove the file; the same command makes it again.",
) -> list[dict[str, Any]]:
    """Return the object in each line; an empty list if there is no file.

    A last line without a line break was cut off by a kill or a full disk. It is left out.

    resume: more lines will be appended, so a line that was cut off is removed from the file.

    Raises PastaError, without a change of the file, for a line that is not a JSON object.
    """
    contents = path.read_bytes() if path.exists() else b""
    *lines, cut_off = contents.split(b"\n")
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            objects.append(dict(json.loads(line.decode("utf-8"))))
        except (ValueError, TypeError, RecursionError) as error:
            raise PastaError(f"{path}:{number}: not a JSON object: {error}", hint=hint) from error
    if resume and cut_off:
        write_text(path, contents.removesuffix(cut_off).decode("utf-8"))
    return objects


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line; make the folder if needed. When this returns, a kill cannot lose the line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(line) + "\n")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write all lines of a file; until that is done, the old file stays."""
    write_text(path, "".join(to_json(line) + "\n" for line in lines))


def read_json(path: Path, kind: type[JsonValue]) -> JsonValue:
    """Return the list or dict in a JSON file. Raises PastaError if there is no such value."""
    with errors_as(f"cannot read {path}", OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, kind):
        raise PastaError(f"{path} holds no JSON {kind.__name__}")
    return value
