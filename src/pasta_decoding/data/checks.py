"""What a program can verify of a plain answer, in the manner of IFEval (Zhou et al. 2023).

A line of a file of prompts may have the key `checks`: a list of objects such as
`{"kind": "words", "arguments": {"at_most": 50}}`. `KINDS` has the rule of each kind. Upper and
lower case are equal except to the kinds that are about them.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pasta_decoding.data.forms import JsonObject
from pasta_decoding.data.rows import parse_prompts, question_of
from pasta_decoding.errors import PastaError

Rule = Callable[..., bool]
"""(answer, **arguments) -> whether the answer passes. It accepts any text that is not blank."""

_ARGUMENT_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "array": bool,
    "at_least": int,
    "at_most": int,
    "characters": str,
    "keys": list,
    "length": int,
    "string": str,
    "strings": list,
    "value": (int, float),
    "word": str,
}
_BULLET = r"[-*+\u2022]"
_NUMBER = r"\d{1,3}[.)]"
_NUMERAL = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?")
_BOLD = re.compile(r"\*\*[^*\n]+\*\*")
_HEADING = re.compile(r"^(?:#{1,6} +\S.*|\*\*[^*\n]+\*\*:?[ \t]*)$", re.MULTILINE)
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]*_]*+(?=\s|\Z)")
# Points that end no sentence: of titles, before a number or a small letter, of initials in front of
# a name, and of a list marker.
_ABBREVIATION = re.compile(
    r"\b(?i:e\.g|i\.e|mr|mrs|ms|dr|prof|st|vs)\.(?=\s)"
    r"|\b(?i:no)\.(?=\s+\d)"
    r"|\b(?:(?i:etc|inc|jr|sr)|(?:[A-Za-z]\.)+[A-Za-z])\.(?=\s+[a-z])"
    r"|\b(?:[A-Z]\.\s+)+[A-Z]\.(?=\s+[A-Z])"
    r"|^\s*\d{1,3}\.(?=\s)"
)
_NOT_IN_WORD = r"(?:(?<!\w)|(?!\w))"
_EMPHASIS_AND_QUOTES = "*_\"'`\u201c\u201d "
_MAX_TITLE_WORDS = 12


@dataclass(frozen=True, slots=True)
class Check:
    """A demand on an answer: a kind of `KINDS`, with the arguments of its rule."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_checks(paths: Iterable[Path]) -> dict[str, list[Check]]:
    """Return the checks of each prompt that has some, by the id of its `Question`.

    The checks of a prompt that comes twice add up. Raises PastaError that names file and line.
    """
    checks_by_prompt: dict[str, list[Check]] = {}
    for path in paths:
        for instruction, checks in parse_prompts(path, _checks_of):
            if checks:
                checks_by_prompt.setdefault(question_of(instruction).id, []).extend(checks)
    return checks_by_prompt


def share_passed(checks: Sequence[Check], answer: str) -> float:
    """Return the share of the checks, of which there is at least one, that an answer passes.

    answer: plain text. A blank one passes no check.
    """
    if not answer.strip():
        return 0.0
    return sum(KINDS[check.kind](answer, **check.arguments) for check in checks) / len(checks)


def _checks_of(fields: JsonObject) -> list[Check]:
    entries = fields.get("checks") or []
    if not isinstance(entries, list):
        raise PastaError("'checks' is not a list")
    return [_check(entry) for entry in entries]


def _check(entry: object) -> Check:
    if not isinstance(entry, dict) or not entry.keys() <= {"kind", "arguments"}:
        raise PastaError(f"a check is an object with 'kind' and 'arguments', not {entry!r}")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PastaError(f"no check is called {kind!r}; there are {', '.join(KINDS)}")
    arguments = entry.get("arguments") or {}
    if not isinstance(arguments, dict) or not _fit(kind, arguments):
        _, *parameters = inspect.signature(KINDS[kind]).parameters
        takes = ", ".join(parameters) or "no arguments"
        raise PastaError(f"the check {kind!r} takes {takes}, not {arguments!r}")
    return Check(kind, arguments)


def _fit(kind: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a rule accepts these arguments. A count needs a bound."""
    try:
        inspect.signature(KINDS[kind]).bind("", **arguments)
    except TypeError:
        return False
    if kind in _COUNTERS and not arguments:
        return False
    return all(_has_type(value, _ARGUMENT_TYPES[name]) for name, value in arguments.items())


def _has_type(value: object, types: type | tuple[type, ...]) -> bool:
    if isinstance(value, list):
        return types is list and bool(value) and all(_has_type(text, str) for text in value)
    if isinstance(value, str):
        return types is str and bool(value.strip())
    return isinstance(value, types) and isinstance(value, bool) == (types is bool)


def _sentences(answer: str) -> int:
    """Count sentences; a line break ends one, with or without a full stop."""
    sentences: list[str] = []
    for line in answer.split("\n"):
        sentences += _SENTENCE_END.split(_ABBREVIATION.sub(" ", line))
    return sum(any(map(str.isalnum, sentence)) for sentence in sentences)


def _items(answer: str, marker: str = f"(?:{_BULLET}|{_NUMBER})") -> int:
    """Count the list items that have text, those of inner lists included."""
    return len(re.findall(rf"^[ \t]*{marker}[ \t](?=.*\w)", answer, re.MULTILINE))


def _counted(counter: Callable[[str], int]) -> Rule:
    def within(answer: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
        count = counter(answer)
        return count >= at_least and (at_most is None or count <= at_most)

    return within


def _occurs(answer: str, *, word: str, at_least: int = 1, at_most: int | None = None) -> bool:
    rule = _counted(lambda text: len(_phrase(word).findall(text)))
    return rule(answer, at_least=at_least, at_most=at_most)


def _includes_any(answer: str, *, strings: Sequence[str]) -> bool:
    return any(_phrase(string).search(answer) for string in strings)


def _ends(answer: str, *, string: str) -> bool:
    """The last words are these; a full stop after them makes no difference."""
    ending = _phrase(_bare(string, ".")).pattern + r"\Z"
    return re.search(ending, _bare(answer, ".")) is not None


def _phrase(string: str) -> re.Pattern[str]:
    """Return the pattern of a string as whole words, with any space between them."""
    spaced = r"\s+".join(map(re.escape, string.split()))
    return re.compile(_NOT_IN_WORD + spaced + _NOT_IN_WORD, re.IGNORECASE)


def _bare(text: str, final_marks: str = "") -> str:
    """Return a text in lower case, with single spaces, and without emphasis and quotes around."""
    single_spaced = " ".join(text.split()).casefold()
    return single_spaced.strip(_EMPHASIS_AND_QUOTES).rstrip(_EMPHASIS_AND_QUOTES + final_marks)


def _json(
    answer: str, *, array: bool = False, keys: Sequence[str] = (), length: int | None = None
) -> bool:
    """JSON and nothing else, which may be fenced: an object with the keys, or an array."""
    fenced = _FENCED.fullmatch(answer.strip())
    try:
        value = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, list if array else dict):
        return False
    return all(key in value for key in keys) and length in (None, len(value))


def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 2 and text[0] + text[-1] in ('""', "\u201c\u201d")


def _titled(answer: str) -> bool:
    """A first line that is a heading, or short without being a sentence or an item; then text."""
    title, _, body = answer.strip().partition("\n")
    if not body.strip():
        return False
    if _HEADING.match(title) or title.casefold().startswith("title:"):
        return True
    is_short = len(title.split()) <= _MAX_TITLE_WORDS and not title.rstrip().endswith(tuple(".,:;"))
    return is_short and not _items(title)


def _total(answer: str, *, value: float) -> bool:
    """The last number is this one: of the last line that says "total", if there is such a line."""
    numerals = _NUMERAL.findall(answer)
    for line in answer.split("\n"):
        if re.search(r"\btotal\b", line, re.IGNORECASE):
            numerals = _NUMERAL.findall(line) or numerals
    if not numerals:
        return False
    return math.isclose(float(numerals[-1].replace(",", "")), value, abs_tol=0.005)


_COUNTERS: Mapping[str, Callable[[str], int]] = {
    "words": lambda answer: sum(any(map(str.isalnum, word)) for word in answer.split()),
    "sentences": _sentences,
    "paragraphs": lambda answer: len(re.split(r"\n\s*\n", answer.strip())),
    "lines": lambda answer: sum(bool(line.strip()) for line in answer.split("\n")),
    "items": _items,
    "bullets": lambda answer: _items(answer, _BULLET),
    "numbered": lambda answer: _items(answer, _NUMBER),
    "headings": lambda answer: len(_HEADING.findall(answer)),
    "bold": lambda answer: len(_BOLD.findall(answer)),
    "placeholders": lambda answer: len(re.findall(r"\[[^\[\]\n]+\]", answer)),
}
KINDS: Mapping[str, Rule] = {
    **{kind: _counted(counter) for kind, counter in _COUNTERS.items()},
    "occurs": _occurs,
    "includes": lambda answer, *, strings: all(_phrase(text).search(answer) for text in strings),
    "includes_any": _includes_any,
    "excludes": lambda answer, *, strings: not _includes_any(answer, strings=strings),
    "without": lambda answer, *, characters: set(characters.casefold()).isdisjoint(
        answer.casefold()
    ),
    "begins": lambda answer, *, string: bool(_phrase(_bare(string)).match(_bare(answer))),
    "ends": _ends,
    "one_of": lambda answer, *, strings: (
        _bare(answer, ".!") in {_bare(text, ".!") for text in strings}
    ),
    "json": _json,
    "upper": str.isupper,
    "lower": str.islower,
    "quoted": _quoted,
    "titled": _titled,
    "total": _total,
}
