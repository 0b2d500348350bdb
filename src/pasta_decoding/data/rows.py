"""Instruction-response rows and prompts: JSON lines or one JSON list, .gz by the file's name.

A row is one JSON object in one of the forms of `forms.py`; `id` and `source` may be missing. A
prompt file has the same forms and needs no responses. Files are written whole or not at all.
"""

import codecs
import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pasta_decoding.data.forms import COLUMNS, JsonObject, judged_turns_of, text_field, turns_of
from pasta_decoding.errors import PastaError
from pasta_decoding.files import to_json, written_whole
from pasta_decoding.models.template import Message

Parsed = TypeVar("Parsed")
_FIELDS = ("id", "source", "instruction", "response")


@dataclass(frozen=True, slots=True)
class Row:
    """One answered instruction. `response` may hold tags in text form.

    id:      the file's, else one made of what the row says (`derived_id`); numbered if used before.
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
        return [*self.history, Message("user", self.instruction)]

    @property
    def asked(self) -> str:
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
    return Question(_digest(instruction), instruction, dataset)


def derived_id(row: Row) -> str:
    """Return the id of a row that was given none: a digest of what is asked and answered."""
    said = [*((turn.role, turn.content) for turn in row.conversation), row.response]
    return _digest(json.dumps(said))


def digest(rows: Iterable[Row]) -> str:
    return _digest("".join(map(derived_id, rows)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(*paths: Path) -> Iterator[Row]:
    """Yield the rows of files in order. Raises PastaError that names file and line."""
    seen: Counter[str] = Counter()
    for path in paths:
        yield from _sound(path, lambda found: _row(found, seen))


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | PastaError]]:
    """Yield each row, or what is wrong with its line, with the line's number."""
    seen: Counter[str] = Counter()
    return _parsed(path, lambda found: _row(found, seen))


def read_pairs(path: Path) -> Iterator[tuple[Row, Row]]:
    """Yield each prompt with the answer that was chosen, and with the one that was rejected."""
    return _sound(path, _pair)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file. A conversation is refused: one question is asked."""
    return list(_sound(path, _one_question))


def read_questions(path: Path) -> list[Question]:
    """Return the prompts of an evaluation; none may be empty, or there twice."""
    seen: set[str] = set()

    def parse(found: JsonObject) -> Question:
        question = question_of(_one_question(found), _name(found, "dataset") or None)
        if not question.instruction.strip():
            raise PastaError("the prompt is empty")
        if question.id in seen:
            raise PastaError("the same prompt came before")
        seen.add(question.id)
        return question

    if not (questions := list(_sound(path, parse))):
        raise PastaError(f"{path} holds no prompt")
    return questions


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write `rows` to `path`; until all are written, what was there stays."""
    contents = "".join(map(_line, rows)).encode("utf-8")
    if path.suffix == ".gz":  # without a time in it: equal rows give equal bytes
        contents = gzip.compress(contents, mtime=0)
    try:
        with written_whole(path) as partial:
            partial.write_bytes(contents)
    except OSError as error:
        raise PastaError(f"cannot write {path}: {error.strerror or error}") from error


def _line(row: Row) -> str:
    found = {name: getattr(row, name) for name in _FIELDS}
    history = {"history": [asdict(turn) for turn in row.history]} if row.history else {}
    return to_json(found | history | row.extra) + "\n"


def _sound(path: Path, parse: Callable[[JsonObject], Parsed]) -> Iterator[Parsed]:
    for _number, found in _parsed(path, parse):
        if isinstance(found, PastaError):
            raise found
        yield found


def _parsed(
    path: Path, parse: Callable[[JsonObject], Parsed]
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
        reason = getattr(error, "strerror", None) or error
        raise PastaError(f"cannot read {path}: {reason}") from error
    contents = contents.removeprefix(codecs.BOM_UTF8)
    if contents.lstrip().startswith(b"["):
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


def _row(found: JsonObject, seen: Counter[str]) -> Row:
    row = _answered(turns_of(found, answered=True), found)
    row_id = _name(found, "id") or row.id
    while seen[row_id]:
        seen[row_id] += 1
        row_id += f"-{seen[row_id]}"
    seen[row_id] = 1
    return replace(row, id=row_id)


def _name(found: JsonObject, name: str) -> str:
    """Return what a column calls the row, if anything; some programs count them."""
    value = found.get(name)
    return str(value) if type(value) in (int, float) else text_field(found, name, "")


def _answered(turns: Sequence[Message], found: JsonObject) -> Row:
    if [turn.role for turn in turns[-2:]] != ["user", "assistant"]:
        raise PastaError("the conversation does not end with a user's message and its answer")
    *history, asked, answer = turns
    extra = {key: value for key, value in found.items() if key not in (*_FIELDS, *COLUMNS)}
    row = Row("", _name(found, "source"), asked.content, answer.content, extra, tuple(history))
    return replace(row, id=derived_id(row))


def _pair(found: JsonObject) -> tuple[Row, Row]:
    turns = (judged_turns_of(found, name) for name in ("chosen", "rejected"))
    chosen, rejected = (_answered(one, found) for one in turns)
    if chosen.conversation != rejected.conversation:
        raise PastaError("'chosen' and 'rejected' answer different prompts")
    return replace(chosen, id=_name(found, "id") or chosen.id), rejected


def _one_question(found: JsonObject) -> str:
    turns = turns_of(found, answered=False)
    if [turn.role for turn in turns] != ["user"]:
        raise PastaError("the prompt is a conversation, not one user's message")
    return turns[0].content
