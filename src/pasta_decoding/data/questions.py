"""The prompts of an evaluation, and which ones are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.data.dataset import read_lines, read_objects
from pasta_decoding.errors import PastaError

Found = tuple[str, dict[str, object]]
"""Where an object stands, for messages, and the object."""


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
    return Question(hashlib.sha256(instruction.encode()).hexdigest()[:16], instruction, dataset)


def read_questions(path: Path) -> list[Question]:
    """Return the prompts of a JSONL file (.gz), or of a JSON list as AlpacaEval has them.

    Each has an `instruction`, and may have a `dataset` and an `instruction_id`. Raises PastaError,
    naming the place, for what is broken, empty or there twice, and for a file without any.
    """
    questions: dict[str, Question] = {}
    places: dict[object, str] = {}
    for place, found in _objects(path):
        try:
            question = _question(found)
            for key in (("instruction", question.id), ("instruction_id", _row_id(found))):
                _check_new(places, key, place)
        except PastaError as problem:
            raise PastaError(f"{place}: {problem}", hint=problem.hint) from problem
        questions[question.id] = question
    if not questions:
        raise PastaError(f"{path} holds no prompt", hint="Give it an `instruction` a line.")
    return list(questions.values())


def _objects(path: Path) -> Iterator[Found]:
    first = next((line for line in read_lines(path) if line.strip()), b"")
    if first.lstrip().startswith(b"["):
        return _of_list(path)
    return ((f"{path}:{number}", found) for number, found in read_objects(path))


def _of_list(path: Path) -> Iterator[Found]:
    try:
        listed = json.loads(b"".join(read_lines(path)).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PastaError(f"{path}:{line}: not UTF-8", hint="Save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise PastaError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise PastaError(f"{path}: not JSON that can be read") from error
    for number, found in enumerate(listed, start=1):
        place = f"{path}, entry {number}"
        if not isinstance(found, dict):
            raise PastaError(f"{place}: not a JSON object")
        yield place, found


def _question(found: dict[str, object]) -> Question:
    instruction, dataset = found.get("instruction"), found.get("dataset")
    if not isinstance(instruction, str):
        fault = "is not a string" if "instruction" in found else "is missing"
        raise PastaError(f"'instruction' {fault}", hint="Every prompt needs one.")
    if not instruction.strip():
        raise PastaError("'instruction' is empty", hint="Take the line out, or say what to answer.")
    if not (dataset is None or isinstance(dataset, str)):
        raise PastaError("'dataset' is not a string")
    try:
        return question_of(instruction, dataset)
    except UnicodeEncodeError as error:
        raise PastaError("'instruction' holds half a surrogate pair") from error


def _row_id(found: dict[str, object]) -> str | int | None:
    row_id = found.get("instruction_id")
    if row_id is None or isinstance(row_id, str | int):
        return row_id
    raise PastaError("'instruction_id' is neither a string nor a whole number")


def _check_new(places: dict[object, str], key: tuple[str, str | int | None], place: str) -> None:
    name, value = key
    if value is None:
        return
    if key in places:
        raise PastaError(
            f"the same {name!r} as {places[key]}", hint="Records are kept by it: take one out."
        )
    places[key] = place
