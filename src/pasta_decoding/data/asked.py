"""What a file of prompts asks of their answers, beyond answering: JSONL (.gz), a prompt a line.

Each line has an `instruction` (prompts of stage 2 may have another form, see data/dataset.py), and
any of these:

- `checks`: a list of {"kind", "arguments"}, see data/checks.py;
- `plain`: true where nothing can be promised: a rewrite, an extraction, a short fact, a poem;
- `needs_sync`: whether the answer needs its parts; `must_use`, `at_least` and `number` say what
  stands behind the sync of a right one: so many (1) of these beginnings of words, and a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasta_decoding.data.checks import Check, make_check
from pasta_decoding.data.dataset import one_question, read_objects
from pasta_decoding.data.questions import question_of, read_questions
from pasta_decoding.data.syncs import uses_parts
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import MOST_REP_4, empty_items, rep_4
from pasta_decoding.lang.tree import Chunk, Sync, Tree, strip

_KEYS = {"plain": bool, "needs_sync": bool, "number": bool, "at_least": int}


@dataclass(frozen=True, slots=True)
class BehindSync:
    """What must stand behind the sync of a right answer."""

    must_use: tuple[str, ...] = ()
    at_least: int = 1
    number: bool = False

    def holds(self, text: str) -> bool:
        """Does this text hold it?"""
        used = [
            one
            for one in self.must_use
            if re.search(rf"(?<!\w){re.escape(one)}", text, re.IGNORECASE)
        ]
        enough = len(used) >= self.at_least or not self.must_use
        return enough and (not self.number or any(c.isdecimal() for c in text))


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and what its answer is looked at for.

    id:         the question's, by which records are found.
    name:       what the file calls it.
    needs_sync: None where the file does not say.
    behind:     None where nothing is known of a right answer.
    """

    id: str
    name: str
    instruction: str
    checks: tuple[Check, ...] = ()
    plain: bool = False
    needs_sync: bool | None = None
    behind: BehindSync | None = None

    def is_met(self, tree: Tree) -> bool:
        """Does an answer do all that is asked? `behind` is left out: it knows some right answers.

        Its text passes all checks; where it should be plain it has no chunk; where it needs its
        parts, text behind a sync uses one (data/syncs.py), and where it does not there is no sync.
        """
        text, instruction = strip(tree), self.instruction
        kinds = {type(node) for node in tree}
        return (
            not (self.plain and Chunk in kinds)
            and not (self.needs_sync is True and not uses_parts(tree, instruction))
            and not (self.needs_sync is False and Sync in kinds)
            and all(check.passes(text) for check in self.checks)
        )

    def is_sound(self, tree: Tree) -> bool:
        """Is an answer that ended by itself fit to learn from?

        It says something, does all that is asked, has no empty list item, and hardly repeats
        itself (`MOST_REP_4`).
        """
        text = strip(tree)
        return (
            bool(text.strip())
            and not empty_items(text)
            and rep_4(text) < MOST_REP_4
            and self.is_met(tree)
        )


def asked_of(instruction: str) -> Asked:
    """Return a prompt that asks for nothing but an answer."""
    return Asked(question_of(instruction).id, "", instruction)


def each_once(prompts: Iterable[Asked]) -> list[Asked]:
    """Return the prompts in order, of those with the same text the first."""
    first: dict[str, Asked] = {}
    for one in prompts:
        first.setdefault(one.id, one)
    return list(first.values())


def read_asked(path: Path, *, anything: bool = False) -> list[Asked]:
    """Return what a file asks. Raises PastaError, naming the line, for what cannot be verified.

    anything: no line needs to ask for more than an answer.
    """
    read_questions(path)  # refuses what no run could have answered
    found = read_all_asked(path)
    if not anything and not any(
        one.checks or one.plain or one.needs_sync is not None for one in found
    ):
        hint = (
            "Its lines need `checks`, `plain` or `needs_sync`, as data/checked_prompts.jsonl has."
        )
        raise PastaError(f"{path} asks nothing that could be checked", hint=hint)
    return found


def read_all_asked(path: Path) -> list[Asked]:
    """Return the prompts of a file, whether or not they ask for more than an answer."""
    found: list[Asked] = []
    names: set[str] = set()
    for number, line in read_objects(path):
        try:
            one = _asked(line, number)
            if one.name in names:
                raise PastaError(
                    f"id {one.name!r} was used before", hint="Give every prompt its own."
                )
        except PastaError as problem:
            raise PastaError(f"{path}:{number}: {problem}", hint=problem.hint) from problem
        names.add(one.name)
        found.append(one)
    return found


def _asked(line: Mapping[str, Any], number: int) -> Asked:
    for key, kind in _KEYS.items():
        if key in line and type(line[key]) is not kind:
            raise PastaError(f"{key!r} is no {kind.__name__}: {line[key]!r}")
    instruction = one_question(line)
    return Asked(
        id=question_of(instruction).id,
        name=str(number if line.get("id") is None else line["id"]),
        instruction=instruction,
        checks=tuple(_check(one) for one in _list(line, "checks")),
        plain=line.get("plain", False),
        needs_sync=line.get("needs_sync"),
        behind=_behind(line),
    )


def _check(found: object) -> Check:
    if not (isinstance(found, dict) and isinstance(found.get("kind"), str)):
        raise PastaError(f"not a check: {found!r}", hint="It has a `kind`, and `arguments`.")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        raise PastaError(f"the arguments of {found['kind']!r} are no JSON object")
    return make_check(found["kind"], arguments)


def _behind(line: Mapping[str, Any]) -> BehindSync | None:
    must_use, number = _list(line, "must_use"), line.get("number", False)
    if not all(isinstance(one, str) and one for one in must_use):
        raise PastaError(f"'must_use' holds something that is no text: {must_use!r}")
    if not (must_use or number):
        return None
    return BehindSync(tuple(must_use), line.get("at_least", 1), number)


def _list(line: Mapping[str, Any], key: str) -> list[Any]:
    found = line.get(key, [])
    if not isinstance(found, list):
        raise PastaError(f"{key!r} is no list: {found!r}")
    return found
