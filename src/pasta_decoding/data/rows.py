"""Instruction-response rows and prompts: JSON lines or one JSON list, .gz by the file's name.

`forms` says how a row may look; `id` and `source` may be missing. A prompt file has the same forms
and needs no responses. Files are written whole or not at all.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from pasta_decoding.data.forms import COLUMNS, Found, one_question, text_of, turns_of
from pasta_decoding.data.lines import encode_line
from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.models.prompt import Message

Parsed = TypeVar("Parsed")
_FIELDS = ("id", "source", "instruction", "response")


@dataclass(frozen=True, slots=True)
class Row:
    """One answered instruction. `response` may hold tags in text form.

    id:      the file's, else one made of what the row says (`derived_id`).
    extra:   keys of the file that have no field here, written back unchanged.
    history: the conversation before the instruction, plain text, such as a system message.
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


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. `id` is the digest of its text, so that records of all methods find each other.

    dataset: the part of AlpacaEval that it belongs to; None if the file does not say.
    """

    id: str
    instruction: str
    dataset: str | None = None


def question_of(instruction: str, dataset: str | None = None) -> Question:
    """Return a question under its id."""
    return Question(_digest(instruction), instruction, dataset)


def derived_id(row: Row) -> str:
    """Return the id of a row that was given none: a digest of what is asked and answered."""
    said = [*((turn.role, turn.content) for turn in row.conversation), row.response]
    return _digest(json.dumps(said))


def digest(rows: Iterable[Row]) -> str:
    """Return a digest of what rows ask and answer, in their order."""
    return _digest("".join(map(derived_id, rows)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Reading. A broken line raises a PastaError that names file and line.


def read_rows(*paths: Path) -> Iterator[Row]:
    """Yield the rows of files in order. An id may be there once."""
    seen: set[str] = set()
    for path in paths:
        yield from _sound(path, lambda found: _row(found, seen))


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | PastaError]]:
    """Yield each row, or what is wrong with its line, with the line's number."""
    seen: set[str] = set()
    return _parsed(path, lambda found: _row(found, seen))


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file. A conversation is refused: one question is asked."""
    return list(_sound(path, one_question))


def read_questions(path: Path) -> list[Question]:
    """Return the prompts of an evaluation; none may be empty, or there twice."""
    seen: set[str] = set()

    def parse(found: Found) -> Question:
        question = question_of(one_question(found), text_of(found, "dataset", "") or None)
        if not question.instruction.strip():
            raise PastaError("the prompt is empty")
        if question.id in seen:
            raise PastaError("the same prompt came before")
        seen.add(question.id)
        return question

    questions = list(_sound(path, parse))
    if not questions:
        raise PastaError(f"{path} holds no prompt")
    return questions


def _sound(path: Path, parse: Callable[[Found], Parsed]) -> Iterator[Parsed]:
    for _number, found in _parsed(path, parse):
        if isinstance(found, PastaError):
            raise found
        yield found


def _parsed(
    path: Path, parse: Callable[[Found], Parsed]
) -> Iterator[tuple[int, Parsed | PastaError]]:
    """Yield what `parse` makes of each JSON object, or its error, and the line's number."""
    for number, entry in _entries(path):
        try:
            found = _json(entry) if isinstance(entry, bytes) else entry
            if not isinstance(found, dict):
                raise PastaError("not a JSON object")
            yield number, parse(found)
        except PastaError as problem:
            yield number, PastaError(f"{path}:{number}: {problem}")


def _entries(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the lines of a file that are not blank, as bytes; or the entries of a JSON list."""
    try:
        contents = path.read_bytes()
        contents = gzip.decompress(contents) if path.suffix == ".gz" else contents
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot("read", path, error) from error
    contents = contents.removeprefix(codecs.BOM_UTF8)
    if contents[:1000].lstrip().startswith(b"["):
        try:
            yield from enumerate(_json(contents), start=1)
        except PastaError as problem:
            raise PastaError(f"{path}: {problem}") from problem
        return
    for number, line in enumerate(contents.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _json(contents: bytes) -> Any:
    try:
        # NaN is no JSON: no other program could read what is written of it.
        return json.loads(contents.rstrip(b"\r").decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise PastaError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise PastaError(f"not JSON: {error.msg} ({line}column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise PastaError("not JSON that can be read: too deep, or a number too long") from error


def _row(found: Found, seen: set[str]) -> Row:
    turns = turns_of(found, answered=True)
    if [turn.role for turn in turns[-2:]] != ["user", "assistant"]:
        raise PastaError("the conversation does not end with a user's message and its answer")
    *history, asked, answered = turns
    source = text_of(found, "source", "")
    extra = {key: value for key, value in found.items() if key not in {*_FIELDS, *COLUMNS}}
    row = Row("", source, asked.content, answered.content, extra, tuple(history))
    derived = derived_id(row)
    row_id = found.get("id", derived)
    if isinstance(row_id, int | float) and not isinstance(row_id, bool):
        row_id = str(row_id)
    row_id = text_of({"id": row_id}, "id", derived)
    if row_id in seen and row_id.startswith(derived):  # it only says what the row says
        row_id = next(one for n in count(2) if (one := f"{derived}-{n}") not in seen)
    if not row_id or row_id in seen:
        raise PastaError(f"id {row_id!r} was used before" if row_id else "the id is empty")
    seen.add(row_id)
    return replace(row, id=row_id)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write `rows` to `path`; until all are written, what was there stays."""
    try:
        with written_whole(path) as partial, partial.open("wb") as file:
            if path.suffix == ".gz":  # no name and no time in it: equal rows give equal bytes
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                    packed.writelines(map(_line, rows))
            else:
                file.writelines(map(_line, rows))
    except OSError as error:
        raise _cannot("write", path, error) from error


def _line(row: Row) -> bytes:
    history = [{"role": turn.role, "content": turn.content} for turn in row.history]
    found = {name: getattr(row, name) for name in _FIELDS}
    line = encode_line(found | ({"history": history} if history else {}) | row.extra)
    return line.encode("utf-8")


def _cannot(verb: str, path: Path, error: Exception) -> PastaError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return PastaError(f"cannot {verb} {path}: {reason}")
