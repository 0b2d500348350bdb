"""What a program can verify of an answer, in the manner of IFEval (Zhou et al. 2023).

A check is a kind and its arguments: `{"kind": "words", "arguments": {"at_most": 50}}`. `KINDS` has
a verifier for each kind: a pure function of the answer's text, which accepts any text. Counts are
of what a person would count: words between spaces, sentences by their ends, list items and
paragraphs by their lines. Case never matters but to the kinds that are about it.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import dropwhile
from typing import Any

from pasta_decoding.errors import PastaError

BULLET, NUMBER = r"[-*+\u2022]", r"\d{1,3}[.)]"
_FENCED = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)
_NUMERAL = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?")
_TOTAL = re.compile(r"\btotal\b", re.IGNORECASE)
_QUOTES = {'"': '"', "\u201c": "\u201d"}
_SENTENCE_END = re.compile(r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]*_]*+(?=\s|\Z)")
# The points of these end no sentence: of titles, of what goes on with a small letter, of initials
# in front of a name, and of a list marker.
_NO_END = re.compile(
    r"\b(?i:e\.g|i\.e|mr|mrs|ms|dr|prof|st|vs)\.(?=\s)"
    r"|\b(?i:no)\.(?=\s+\d)"
    r"|\b(?:(?i:etc|inc|jr|sr)|(?:[A-Za-z]\.)+[A-Za-z])\.(?=\s+[a-z])"
    r"|\b(?:[A-Z]\.\s+)+[A-Z]\.(?=\s+[A-Z])"
    r"|^\s*\d{1,3}\.(?=\s)",
    re.MULTILINE,
)
_MARKS = "*_\"'`\u201c\u201d "

_KINDS_OF_ARGUMENTS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list[str]": (list,),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is asked of an answer. `make_check` makes those that can be verified."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def passes(self, text: str) -> bool:
        """Does the answer's text do what is asked? An empty text never does."""
        return bool(text.strip()) and KINDS[self.kind](text, **self.arguments)


def make_check(kind: str, arguments: Mapping[str, Any]) -> Check:
    """Return a check. Raises PastaError for an unknown kind, or arguments that it does not take."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"Is it {near[0]!r}?" if near else f"There are {', '.join(sorted(KINDS))}."
        raise PastaError(f"no check is called {kind!r}", hint=hint)
    parameters = inspect.signature(KINDS[kind]).parameters
    wanted = {name: one for name, one in parameters.items() if name != "text"}
    takes = ", ".join(f"{name}: {one.annotation}" for name, one in wanted.items())
    hint = f"It takes {takes or 'nothing'}."
    for name, value in arguments.items():
        if name not in wanted or not _suits(value, wanted[name].annotation):
            raise PastaError(f"the check {kind!r} does not take {name} = {value!r}", hint=hint)
    lacking = [n for n, one in wanted.items() if one.default is one.empty and n not in arguments]
    if lacking or (wanted and not arguments):
        raise PastaError(f"the check {kind!r} lacks {', '.join(lacking) or 'a bound'}", hint=hint)
    return Check(kind, dict(arguments))


def _suits(value: object, annotation: str) -> bool:
    """Is a value from JSON what a verifier's argument is annotated with?"""
    name = annotation.removesuffix(" | None")
    if isinstance(value, bool) and name != "bool":
        return False
    if isinstance(value, list):
        return name == "list[str]" and bool(value) and all(map(_says_something, value))
    kinds = _KINDS_OF_ARGUMENTS[name]
    return isinstance(value, kinds) and (str not in kinds or _says_something(value))


def _says_something(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


# Counts


def words(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Words that hold a letter or a digit, so that a marker or a dash is none."""
    return _within(sum(any(c.isalnum() for c in word) for word in text.split()), at_least, at_most)


def sentences(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Sentences; a last one without its end, and a line that is a heading or an item, are some."""
    return _within(count_sentences(text), at_least, at_most)


def paragraphs(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Stretches between blank lines."""
    found = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    return _within(len(found), at_least, at_most)


def lines(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Lines that are not blank."""
    return _within(sum(bool(line.strip()) for line in text.split("\n")), at_least, at_most)


def items(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Items of lists with text in them, be they numbered or not, those of inner lists included."""
    return _within(_count_items(text, BULLET, NUMBER), at_least, at_most)


def bullets(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Those whose marker is a dash, a star, a plus or a dot."""
    return _within(_count_items(text, BULLET), at_least, at_most)


def numbered(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Those whose marker is a number."""
    return _within(_count_items(text, NUMBER), at_least, at_most)


def headings(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Markdown headings: lines that begin with one to six # and a space, or are bold as a whole."""
    found = re.findall(r"^(?:#{1,6} +\S[^\n]*|\*\*[^*\n]+\*\*:?[ \t]*)$", text, re.MULTILINE)
    return _within(len(found), at_least, at_most)


def bold(text: str, *, at_least: int = 1, at_most: int | None = None) -> bool:
    """Stretches between two pairs of stars."""
    return _within(len(re.findall(r"\*\*[^*\n]+\*\*", text)), at_least, at_most)


def placeholders(text: str, *, at_least: int = 1, at_most: int | None = None) -> bool:
    """Words in square brackets, as letters to be filled in have them."""
    return _within(len(re.findall(r"\[[^\[\]\n]+\]", text)), at_least, at_most)


def occurs(text: str, *, word: str, at_least: int = 1, at_most: int | None = None) -> bool:
    """A word or words, not as a part of a longer one."""
    return _within(len(_word(word).findall(text)), at_least, at_most)


# What is there, and what is not


def includes(text: str, *, strings: list[str]) -> bool:
    """All of the strings stand in it as words."""
    return all(_word(one).search(text) for one in strings)


def includes_any(text: str, *, strings: list[str]) -> bool:
    """At least one of the strings stands in it as words."""
    return any(_word(one).search(text) for one in strings)


def excludes(text: str, *, strings: list[str]) -> bool:
    """None of the strings stands in it as words."""
    return not includes_any(text, strings=strings)


def without(text: str, *, characters: str) -> bool:
    """None of the characters stands in it."""
    return not set(characters.casefold()) & set(text.casefold())


def begins(text: str, *, string: str) -> bool:
    """Its first words are these, marks of emphasis and quotes aside."""
    return _word(_bare(string)).match(_bare(text)) is not None


def ends(text: str, *, string: str) -> bool:
    """Its last words are these, marks of emphasis and quotes aside; the stop may be missing."""
    wanted, found = _bare(string, "."), _bare(text, ".")
    return _word(wanted).match(found, max(0, len(found) - len(wanted))) is not None


# Forms


def is_json(
    text: str, *, array: bool = False, keys: list[str] | None = None, length: int | None = None
) -> bool:
    """It is JSON and nothing else, which may be fenced: an object, or an array.

    keys: of the object, all of which it has. length: of what it is.
    """
    fenced = _FENCED.match(text.strip())
    try:
        found = json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, list if array else dict):
        return False
    return all(key in found for key in keys or ()) and length in (None, len(found))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def upper(text: str) -> bool:
    """There are letters, and none is a small one."""
    return text.isupper()


def lower(text: str) -> bool:
    """There are letters, and none is a capital."""
    return text.islower()


def quoted(text: str) -> bool:
    """All of it stands in one pair of double quotation marks."""
    found = text.strip()
    close = _QUOTES.get(found[:1])
    return close is not None and len(found) > 2 and found.find(close, 1) == len(found) - 1


def titled(text: str) -> bool:
    """The first line is a title: a heading, bold, or at most twelve words that are no list item."""
    first, _, rest = text.strip().partition("\n")
    if not rest.strip() or not any(c.isalnum() for c in first):
        return False
    marked = headings(first.strip(), at_least=1) or first.casefold().startswith("title:")
    alone = len(first.split()) <= 12 and not first.rstrip().endswith((".", ",", ":", ";"))
    return marked or (alone and not _count_items(first, BULLET, NUMBER))


def one_of(text: str, *, strings: list[str]) -> bool:
    """It is one of the strings and nothing else; a last stop does not count."""
    return _bare(text, ".!") in {_bare(one, ".!") for one in strings}


def total(text: str, *, value: float) -> bool:
    """The last number is this one; where a line says `total`, the last of that line.

    Of several such lines the last with a number; if none has one, the next line that does.
    """
    in_lines = [(_TOTAL.search(line) is not None, _numbers(line)) for line in text.split("\n")]
    said = [found for says, found in in_lines if says and found]
    behind = dropwhile(lambda line: not line[0], in_lines)
    after = [found for _, found in behind if found]
    found = said[-1] if said else after[0] if after else _numbers(text)
    return bool(found) and math.isclose(found[-1], value, abs_tol=0.005)


KINDS: Mapping[str, Callable[..., bool]] = {
    "words": words,
    "sentences": sentences,
    "paragraphs": paragraphs,
    "lines": lines,
    "items": items,
    "bullets": bullets,
    "numbered": numbered,
    "headings": headings,
    "bold": bold,
    "placeholders": placeholders,
    "occurs": occurs,
    "includes": includes,
    "includes_any": includes_any,
    "excludes": excludes,
    "without": without,
    "begins": begins,
    "ends": ends,
    "json": is_json,
    "upper": upper,
    "lower": lower,
    "quoted": quoted,
    "titled": titled,
    "one_of": one_of,
    "total": total,
}


def count_sentences(text: str) -> int:
    """Return how many sentences there are, a last one without its end included."""
    return sum(_sentences_of(line) for line in text.split("\n"))


def count_items(text: str) -> tuple[int, int]:
    """Return how many list items with text in them have a bullet, and how many a number."""
    return _count_items(text, BULLET), _count_items(text, NUMBER)


def _sentences_of(line: str) -> int:
    parts = _SENTENCE_END.split(_NO_END.sub(lambda found: found[0].replace(".", " "), line))
    return sum(any(c.isalnum() for c in part) for part in parts)


def _within(number: int, at_least: int, at_most: int | None) -> bool:
    return at_least <= number and (at_most is None or number <= at_most)


def _count_items(text: str, *markers: str) -> int:
    return len(re.findall(rf"^[ \t]*(?:{'|'.join(markers)})[ \t](?=[^\n]*\w)", text, re.MULTILINE))


def _word(string: str) -> re.Pattern[str]:
    """Return the pattern of a string that is not a part of a longer word; any space is one."""
    spaced = r"\s+".join(re.escape(part) for part in string.split())
    before = r"(?<!\w)" if string[:1].isalnum() else ""
    behind = r"(?!\w)" if string[-1:].isalnum() else ""
    return re.compile(f"{before}{spaced}{behind}", re.IGNORECASE)


def _bare(text: str, stops: str = "") -> str:
    """Return a text for comparing: small letters, single spaces, no marks and stops around it."""
    return " ".join(text.split()).strip(_MARKS).rstrip(_MARKS + stops).casefold()


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMERAL.findall(text)]
