"""Reads and writes files of rows: instructions with their responses, or prompts alone.

A file is JSON lines or one JSON list, compressed if its name ends with .gz. Each row is an object
in one of the forms of `forms.py`; `id` and `source` may be missing. A file of prompts has the same
forms and needs no responses.
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

Item = TypeVar("Item")
_FIELDS = ("id", "source", "instruction", "response")


@dataclass(frozen=True, slots=True)
class Row:
    """One answered instruction. `response` may hold tags in text form.

    id:      from the file, else `derived_id`; a number follows if another row has the same id.
    extra:   keys of the file that have no field here; they are written back unchanged.
    history: the conversation before the instruction, such as a system message, as plain text.
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
    def prompt_text(self) -> str:
        """The text of the conversation, without roles."""
        return "\n\n".join(turn.content for turn in self.conversation)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of an evaluation.

    id:      the digest of the text, so it is the same in the records of all methods.
    dataset: the part of AlpacaEval that the prompt belongs to; None if the file does not say.
    """

    id: str
    instruction: str
    dataset: str | None = None


def question_of(instruction: str, dataset: str | None = None) -> Question:
    return Question(_digest(instruction), instruction, dataset)


def derived_id(row: Row) -> str:
    """Return the id of a row that has none in its file: a digest of conversation and response."""
    turns = [(turn.role, turn.content) for turn in row.conversation]
    return _digest(json.dumps([*turns, row.response]))


def digest(rows: Iterable[Row]) -> str:
    """Return a digest of the rows' conversations and responses, in order."""
    return _digest("".join(map(derived_id, rows)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(*paths: Path) -> Iterator[Row]:
    """Yield the rows of files in order. Raises PastaError that names file and line."""
    id_counts: Counter[str] = Counter()
    for path in paths:
        yield from _parse_or_raise(path, lambda fields: _row(fields, id_counts))


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | PastaError]]:
    """Yield each line's number with its row, or with the error of its line."""
    id_counts: Counter[str] = Counter()
    return _parse(path, lambda fields: _row(fields, id_counts))


def read_pairs(path: Path) -> Iterator[tuple[Row, Row]]:
    """Yield each prompt with its chosen answer, and with its rejected one."""
    return _parse_or_raise(path, _pair)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file. Raises PastaError for a conversation of several turns."""
    return list(_parse_or_raise(path, _single_prompt))


def parse_prompts(path: Path, parse: Callable[[JsonObject], Item]) -> Iterator[tuple[str, Item]]:
    """Yield each prompt of a file with what `parse` returns for the fields of its line.

    Raises PastaError, also one of `parse`, with file and line.
    """
    return _parse_or_raise(path, lambda fields: (_single_prompt(fields), parse(fields)))


def read_questions(path: Path) -> list[Question]:
    """Return the prompts of an evaluation. Raises PastaError for an empty or a repeated one."""
    ids: set[str] = set()

    def parse(fields: JsonObject) -> Question:
        question = question_of(_single_prompt(fields), _name_field(fields, "dataset") or None)
        if not question.instruction.strip():
            raise PastaError("the prompt is empty")
        if question.id in ids:
            raise PastaError("the same prompt came before")
        ids.add(question.id)
        return question

    questions = list(_parse_or_raise(path, parse))
    if not questions:
        raise PastaError(f"{path} holds no prompt")
    return questions


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of rows; until that is done, the old file stays."""
    contents = "".join(map(_line, rows)).encode("utf-8")
    if path.suffix == ".gz":  # mtime=0: equal rows give equal bytes
        contents = gzip.compress(contents, mtime=0)
    try:
        with written_whole(path) as partial:
            partial.write_bytes(contents)
    except OSError as error:
        raise PastaError(f"cannot write {path}: {error.strerror or error}") from error


def _line(row: Row) -> str:
    fields: dict[str, object] = {name: getattr(row, name) for name in _FIELDS}
    if row.history:
        fields["history"] = [asdict(turn) for turn in row.history]
    return to_json(fields | row.extra) + "\n"


def _parse_or_raise(path: Path, parse: Callable[[JsonObject], Item]) -> Iterator[Item]:
    for _number, item in _parse(path, parse):
        if isinstance(item, PastaError):
            raise item
        yield item


def _parse(
    path: Path, parse: Callable[[JsonObject], Item]
) -> Iterator[tuple[int, Item | PastaError]]:
    """Yield each line's number with the item that `parse` returns for its object, or its error."""
    for number, entry in _entries(path):
        try:
            value = _json(entry) if isinstance(entry, bytes) else entry
            if not isinstance(value, dict):
                raise PastaError("not a JSON object")
            yield number, parse(value)
        except PastaError as problem:
            yield number, PastaError(f"{path}:{number}: {problem}")


def _entries(path: Path) -> Iterator[tuple[int, object]]:
    """Yield numbered entries: a file's lines that are not blank, as bytes, or its JSON list's."""
    try:
        contents = path.read_bytes()
        if path.suffix == ".gz":
            contents = gzip.decompress(contents)
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
        # NaN is not JSON. It becomes null: other programs could not read it in a file of ours.
        return json.loads(contents.rstrip(b"\r").decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise PastaError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise PastaError(f"not JSON: {error.msg} ({line}column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise PastaError("not JSON that can be read: too deep, or a number too long") from error


def _row(fields: JsonObject, id_counts: Counter[str]) -> Row:
    """Return a row whose id is not in `id_counts`, and count the id."""
    row = _answered_row(turns_of(fields, answered=True), fields)
    row_id = _name_field(fields, "id") or row.id
    while id_counts[row_id]:
        id_counts[row_id] += 1
        row_id += f"-{id_counts[row_id]}"
    id_counts[row_id] = 1
    return replace(row, id=row_id)


def _name_field(fields: JsonObject, name: str) -> str:
    """Return a field as text, "" if it is missing. Some programs use numbers as names."""
    value = fields.get(name)
    return str(value) if type(value) in (int, float) else text_field(fields, name, "")


def _answered_row(turns: Sequence[Message], fields: JsonObject) -> Row:
    if [turn.role for turn in turns[-2:]] != ["user", "assistant"]:
        raise PastaError("the conversation does not end with a user's message and its answer")
    *history, question, answer = turns
    row = Row(
        id="",
        source=_name_field(fields, "source"),
        instruction=question.content,
        response=answer.content,
        extra={key: value for key, value in fields.items() if key not in (*_FIELDS, *COLUMNS)},
        history=tuple(history),
    )
    return replace(row, id=derived_id(row))


def _pair(fields: JsonObject) -> tuple[Row, Row]:
    chosen = _answered_row(judged_turns_of(fields, "chosen"), fields)
    rejected = _answered_row(judged_turns_of(fields, "rejected"), fields)
    if chosen.conversation != rejected.conversation:
        raise PastaError("'chosen' and 'rejected' answer different prompts")
    return replace(chosen, id=_name_field(fields, "id") or chosen.id), rejected


def _single_prompt(fields: JsonObject) -> str:
    turns = turns_of(fields, answered=False)
    if [turn.role for turn in turns] != ["user"]:
        raise PastaError("the prompt is a conversation, not one user's message")
    return turns[0].content
