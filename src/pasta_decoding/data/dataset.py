"""Instruction-response rows as JSONL, plain or gzip-compressed by their name's suffix.

One JSON object a line, in one of three forms; further keys are kept as they are:

- `instruction` and `response`, which is what is written;
- `prompt` and `completion`, each a text or a list of messages;
- `messages`, each with `role` and `content`, of which the last is the response.

`id` and `source` may be missing. Turns before the instruction (a system message, an earlier
question and its answer) are its `history`. Files are written whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import IO

from pasta_decoding.data.lines import encode_line
from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.models.prompt import ROLES, Message

_FIELDS = ("id", "source", "instruction", "response")
_FORMS = "a row has 'instruction' and 'response', or 'prompt' and 'completion', or 'messages'"


@dataclass(frozen=True, slots=True)
class Row:
    """One answered instruction. `response` may hold tags in text form.

    id:      the file's, else one made of what the row says (`derived_id`).
    extra:   keys of the file that have no field here, written back unchanged. Another form of the
             same is none: of two, such as `messages` and `response`, one is read and kept.
    history: the conversation before the instruction, plain text.
    """

    id: str
    source: str
    instruction: str
    response: str
    extra: dict[str, object] = field(default_factory=dict)
    history: tuple[Message, ...] = ()

    @property
    def conversation(self) -> list[Message]:
        """What the response answers, the instruction last."""
        return [*self.history, Message("user", self.instruction)]

    @property
    def asked(self) -> str:
        """The text of all that comes before the response."""
        return "\n\n".join(turn.content for turn in self.conversation)


def derived_id(row: Row) -> str:
    """Return the id of a row that was given none: a digest of what is asked and answered."""
    said = [*((turn.role, turn.content) for turn in row.conversation), row.response]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def digest(rows: Iterable[Row]) -> str:
    """Return a digest of what rows ask and answer, in their order."""
    return hashlib.sha256("".join(map(derived_id, rows)).encode()).hexdigest()[:16]


def read_rows(
    path: Path, *, on_problem: Callable[[PastaError], None] | None = None
) -> Iterator[Row]:
    """Yield the rows of `path` in order; see `numbered_rows`."""
    return (row for _number, row in numbered_rows(path, on_problem=on_problem))


def numbered_rows(
    path: Path, *, on_problem: Callable[[PastaError], None] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of `path` in order with their lines' numbers; blank lines are skipped.

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
            yield number, row


def is_held_out(row_id: str) -> bool:
    """Does a row belong to the quarter that is for judging: never trained or tuned on?"""
    return int(hashlib.sha256(row_id.encode()).hexdigest(), 16) % 4 == 0


def hold_out(rows: Iterable[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return the rows that stay, and about a `share` of all; rows of one id go the same way.

    Another choice than that of `is_held_out`, which may have left out a quarter before. Raises
    PastaError if either part is empty.
    """
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        digest = hashlib.sha256(f"held out {row.id}".encode()).hexdigest()
        parts[int(digest, 16) < share * 16 ** len(digest)].append(row)
    if not all(parts):
        raise PastaError(
            f"a share of {share:g} leaves {len(parts[0])} rows and holds out {len(parts[1])}",
            hint="Give another eval_share, or --eval-data.",
        )
    return parts


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the JSON object of every line that is not blank, with the line's number from 1."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                yield number, _read_object(line)
            except PastaError as problem:
                raise PastaError(f"{path}:{number}: {problem}", hint=problem.hint) from problem


def read_prompts(path: Path) -> list[str]:
    """Return the instruction of every line of a JSONL file; it needs no answer.

    Where there is a conversation around it the line is refused: one question is asked.
    """
    prompts = []
    for number, found in read_objects(path):
        try:
            prompts.append(one_question(found))
        except PastaError as problem:
            raise PastaError(f"{path}:{number}: {problem}", hint=problem.hint) from problem
    return prompts


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write `rows` to `path` and return their number; until all are written `path` is untouched."""
    try:
        with written_whole(path) as partial, partial.open("wb") as file:
            return _write(file, rows, compressed=path.suffix == ".gz")
    except OSError as error:
        raise _cannot("write", path, error) from error


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked if its name ends in .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot("read", path, error) from error


def _read_row(line: bytes, seen: set[str]) -> Row:
    found = _read_object(line)
    turns, keys = _conversation(found)
    *history, asked, answered = turns
    own = {*keys, *_FIELDS, "history"}
    extra = {key: value for key, value in found.items() if key not in own}
    source = _text(found, "source") if found.get("source") is not None else ""
    row = Row("", source, asked.content, answered.content, extra, tuple(history))
    if found.get("id") is None:
        return replace(row, id=_unused(derived_id(row), seen))
    row_id = _text(found, "id")
    if not row_id:
        raise PastaError("the id is empty")
    if row_id in seen:
        raise PastaError(f"id {row_id!r} was used before", hint="give every row its own id")
    return replace(row, id=row_id)


def _unused(row_id: str, seen: set[str]) -> str:
    """Return the id, numbered if the same row came before."""
    again = (f"{row_id}-{number}" for number in count(2))
    return next(one for one in chain([row_id], again) if one not in seen)


def _conversation(found: Mapping[str, object]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the turns of a row, the response last, and the keys that say them."""
    if "instruction" in found or not found.keys() & {"messages", "prompt"}:
        history = _messages(found, "history") if "history" in found else []
        asked, answered = (_text(found, name) for name in ("instruction", "response"))
        turns = [*history, Message("user", asked), Message("assistant", answered)]
        return turns, ("instruction", "response", "history")
    if "messages" in found:
        return _answered(_messages(found, "messages")), ("messages",)
    sides = [*_side(found, "prompt", "user"), *_side(found, "completion", "assistant")]
    return _answered(sides), ("prompt", "completion")


def _answered(turns: list[Message]) -> list[Message]:
    if [turn.role for turn in turns[-2:]] != ["user", "assistant"]:
        raise PastaError("the conversation does not end with a user's message and its answer")
    return turns


def _side(found: Mapping[str, object], name: str, role: str) -> list[Message]:
    """Return a prompt or a completion as turns: a text is what `role` says."""
    if isinstance(found.get(name), list):
        return _messages(found, name)
    return [Message(role, _text(found, name))]


def _messages(found: Mapping[str, object], name: str) -> list[Message]:
    turns = found[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise PastaError(f"{name!r} is not a list of messages", hint=_FORMS)
    return [_message(turn) for turn in turns]


def _message(turn: dict[str, object]) -> Message:
    role, content = _text(turn, "role"), _text(turn, "content")
    if role not in ROLES:
        raise PastaError(f"unknown role {role!r}", hint=f"roles are {', '.join(ROLES)}")
    return Message(role, content)


def one_question(found: Mapping[str, object]) -> str:
    """Return the one thing that is asked, whatever form the row has."""
    if "instruction" in found or not found.keys() & {"messages", "prompt"}:
        return _text(found, "instruction")
    turns = _messages(found, "messages") if "messages" in found else _side(found, "prompt", "user")
    if turns and turns[-1].role == "assistant":
        turns = turns[:-1]
    if [turn.role for turn in turns] != ["user"]:
        raise PastaError("the prompt is a conversation, not one user's message")
    return turns[0].content


def _read_object(line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PastaError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise PastaError(f"not JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise PastaError("not JSON that can be read: too deep, or a number too long") from error
    if not isinstance(found, dict):
        raise PastaError("not a JSON object")
    return found


def _text(found: Mapping[str, object], name: str) -> str:
    if name not in found:
        raise PastaError(f"no {name!r}", hint=_FORMS)
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
        file.write(encode_row(row).encode("utf-8"))
        count += 1
    return count


def encode_row(row: Row) -> str:
    """Return the line of a row, its line break included."""
    history = [{"role": turn.role, "content": turn.content} for turn in row.history]
    found = {name: getattr(row, name) for name in _FIELDS}
    return encode_line(found | ({"history": history} if history else {}) | row.extra)


def _cannot(verb: str, path: Path, error: Exception) -> PastaError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return PastaError(f"cannot {verb} {path}: {reason}")
