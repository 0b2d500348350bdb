"""What of a plain response may become a chunk: its units, and the runs of them.

A unit is never divided: a sentence, a heading, a code block or a table. A candidate is a run of
units: of sentences of one line, of a line, or of whole lines (an item with what stands below it, a
paragraph with its list, a section's body). Nothing here decides what becomes a chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pasta_decoding.data.annotate.outline import Kind, Line, outline, read_lines
from pasta_decoding.data.annotate.structure import sentences

MIN_WORDS = 8  # of a candidate; careful readers hardly ever take a shorter one
MAX_WORDS = 220


@dataclass(frozen=True, slots=True)
class Unit:
    """`text[start:end]`, without white space at its edges.

    kind:   that of its line; "heading" for a short line by itself, too.
    line:   which line or block of code it is in, from 0; blank ones do not count.
    block:  which block of the outline it is in: an item holds what stands below it.
    opens, closes: whether it begins, ends that line.
    """

    start: int
    end: int
    words: int
    kind: Kind
    line: int
    block: int
    opens: bool
    closes: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """Units `first` to `last`, both included."""

    first: int
    last: int


def find_units(text: str) -> tuple[Unit, ...]:
    """Return the units of a response in order; what lies between two is white space or a marker."""
    blocks = outline(text)
    starts = [block.start for block in blocks]
    found: list[Unit] = []
    for number, lines in enumerate(_line_groups(text)):
        place = bisect_right(starts, lines[0].start) - 1
        block = blocks[place]
        heading = block.kind == "heading" and block.start == lines[0].start
        found += _units(text, lines, number, place, heading=heading)
    return tuple(found)


def find_candidates(units: Sequence[Unit]) -> tuple[Candidate, ...]:
    """Return the runs of units that may become a chunk, by their first unit."""
    return tuple(
        Candidate(first, last)
        for first in range(len(units))
        for last in _ends(units, first)
        if MIN_WORDS <= sum(unit.words for unit in units[first : last + 1]) <= MAX_WORDS
    )


def _line_groups(text: str) -> Iterator[list[Line]]:
    """Yield each line that is not blank by itself, the lines of code or of a table together."""
    for kind, lines in groupby(read_lines(text), key=lambda line: line.kind):
        if kind in {"code", "table"}:
            yield list(lines)
        elif kind != "blank":
            yield from ([line] for line in lines)


def _units(
    text: str, lines: Sequence[Line], number: int, block: int, *, heading: bool
) -> Iterator[Unit]:
    line, end = lines[0], lines[-1].end
    whole = line.kind not in {"text", "item"} or heading
    borders = [(line.body, end)] if whole else list(sentences(text, line.body, end))
    kind: Kind = "heading" if heading else line.kind
    for place, (left, right) in enumerate(borders):
        body = text[left:right].strip()
        start = left + len(text[left:right]) - len(text[left:right].lstrip())
        opens, closes = place == 0, place == len(borders) - 1
        words = len(body.split())
        yield Unit(start, start + len(body), words, kind, number, block, opens, closes)


def _ends(units: Sequence[Unit], first: int) -> Iterator[int]:
    """Yield where a candidate that begins with unit `first` may end."""
    begin = units[first]
    if begin.kind == "heading":
        return
    for last in range(first, len(units)):
        unit = units[last]
        if unit.line == begin.line:
            yield last
        elif not begin.opens or unit.kind == "heading" or _is_sibling(begin, unit):
            return
        elif unit.closes:
            yield last


def _is_sibling(item: Unit, unit: Unit) -> bool:
    """Tell whether a later unit opens another item of the list that `item` is in."""
    return item.kind == unit.kind == "item" and unit.opens and unit.block != item.block
