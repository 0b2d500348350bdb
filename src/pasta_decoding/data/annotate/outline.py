"""The layout of a plain response: headings, list items, paragraphs, code, and their places.

Every character offset counts from the start of the response. Nothing here decides what
becomes a chunk; that is `structure`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["blank", "heading", "item", "code", "table", "text"]

# Each is matched from a line's first character that is not white space to its last.
_FENCE = re.compile(r"```|~~~")
_TABLE = re.compile(r"\|.*\|$|\+?[-=+|]{5,}$")
_HASHES = re.compile(r"#{1,6}\s+(?P<body>\S.*)")
_BOLD_LINE = re.compile(r"(?P<body>(\*\*|__)[^*_]{1,80}(\*\*|__)\s?:?)$")
_LEAD_IN = r"(?!.*\b(?:are|is|include|includes|following|follows|these|here|can|how to)\b)"
_TITLE_LINE = re.compile(rf"{_LEAD_IN}(?P<body>[A-Z][^.!?:|]{{1,50}}):$")
_NAMED_TITLE = re.compile(r"(?P<body>(?:Title|Headline):\s+\S.*)", re.I)
_ROMAN = re.compile(r"(?P<body>[IVX]{1,5}\.\s+[A-Z].{0,80})$")
_HEADINGS = (_HASHES, _BOLD_LINE, _TITLE_LINE, _NAMED_TITLE, _ROMAN)
_ITEM = re.compile(
    r"(?:(?P<number>\d{1,3})[.)]|\(?[a-z]\)|[-*+\u2022\xb7\u2013\u25aa\u25e6])\s+(?=\S)"
)
_PLAIN_TITLE = re.compile(r"[A-Z\u201c\"][^\s:]*(?:[ ][^\s:]+){0,8}(?<![.!?,;:)\"\u201d\u2026])$")
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]*]{0,4}$")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line break. `body` is where its text begins, behind marker or hashes."""

    kind: Kind
    start: int
    end: int
    body: int
    indent: int = 0
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A run of lines that belong together; an item holds its continuation lines and sub-items."""

    kind: Kind
    start: int
    body: int
    end: int
    lines: tuple[Line, ...]


def outline(text: str) -> tuple[Block, ...]:
    """Return the blocks of `text` in order, white space between them left out."""
    return blocks(read_lines(text), text)


def read_lines(text: str, start: int = 0, end: int | None = None) -> tuple[Line, ...]:
    """Return the lines of `text[start:end]`, each with its kind."""
    lines: list[Line] = []
    in_code = False
    for raw in text[start:end].split("\n"):
        fence = _FENCE.match(raw.lstrip()) is not None
        line = _read_line(raw, start)
        lines.append(replace(line, kind="code") if in_code or fence else line)
        in_code ^= fence
        start += len(raw) + 1
    return tuple(lines)


def _read_line(raw: str, start: int) -> Line:
    end, shown = start + len(raw), raw.strip()
    indent = len(raw) - len(raw.lstrip())
    body = start + indent
    if not shown:
        return Line("blank", start, end, end)
    if _TABLE.match(shown):
        return Line("table", start, end, body, indent)
    if item := _ITEM.match(shown):
        number = int(item["number"]) if item["number"] else None
        return Line("item", start, end, body + item.end(), indent, number)
    for pattern in _HEADINGS:
        if heading := pattern.match(shown):
            return Line("heading", start, end, body + heading.start("body"), indent)
    return Line("text", start, end, body, indent)


def blocks(lines: Sequence[Line], text: str) -> tuple[Block, ...]:
    """Group `lines` into blocks."""
    found: list[Block] = []
    at = 0
    while at < len(lines):
        stop = _block_end(lines, at)
        if lines[at].kind == "text":
            found += [_text_block(run, text) for run in _paragraphs(lines[at:stop], text)]
        elif lines[at].kind != "blank":
            found.append(_block(lines[at:stop]))
        at = stop
    return tuple(found)


def _block(lines: Sequence[Line]) -> Block:
    last = max(index for index, line in enumerate(lines) if line.kind != "blank")
    first = lines[0]
    return Block(first.kind, first.start, first.body, lines[last].end, tuple(lines[: last + 1]))


def _text_block(lines: Sequence[Line], text: str) -> Block:
    """Return the block of `lines`; a short line by itself that is no sentence is a heading."""
    block = _block(lines)
    kind: Kind = (
        "heading"
        if len(lines) == 1 and _PLAIN_TITLE.match(text[block.body : block.end].rstrip())
        else "text"
    )
    return replace(block, kind=kind)


def _block_end(lines: Sequence[Line], at: int) -> int:
    kind = lines[at].kind
    if kind == "item":
        return _item_end(lines, at)
    stop = at + 1
    while kind not in {"heading", "blank"} and stop < len(lines) and lines[stop].kind == kind:
        stop += 1
    return stop


def _item_end(lines: Sequence[Line], at: int) -> int:
    """Return where the item that begins at line `at` ends: at the next number, or by layout."""
    if (following := _next_number(lines, at)) is not None:
        return following
    item, stop = lines[at], at + 1
    loose = _has_loose_sibling(lines, at)
    while stop < len(lines) and _continues(item, lines, stop, loose=loose):
        loose = loose and not (lines[stop].kind == "text" and lines[stop - 1].kind == "blank")
        stop += 1
    return stop


def _next_number(lines: Sequence[Line], at: int) -> int | None:
    """Return the line of the item numbered one higher at the same indent, in the same section."""
    item = lines[at]
    if item.number is None:
        return None
    for index in range(at + 1, len(lines)):
        line = lines[index]
        if line.kind == "heading" and line.indent <= item.indent:
            return None
        if line.kind == "item" and line.number is not None and line.indent <= item.indent:
            same = line.number in {item.number, item.number + 1}
            return index if same and line.indent == item.indent else None
    return None


def _has_loose_sibling(lines: Sequence[Line], at: int) -> bool:
    """Tell whether the numbers before this one have paragraphs of their own below them."""
    item = lines[at]
    if item.number is None or item.number < 2:
        return False
    before = next((lines[i] for i in range(at - 1, -1, -1) if lines[i].kind != "blank"), None)
    return before is not None and before.kind in {"text", "code"} and before.indent <= item.indent


def _continues(item: Line, lines: Sequence[Line], at: int, *, loose: bool) -> bool:
    line = lines[at]
    if line.kind == "blank":
        return True
    if line.kind == "heading":
        return line.indent > item.indent
    if line.kind == "item":
        nested = item.number is not None and line.number is None
        return line.indent > item.indent or nested
    return lines[at - 1].kind != "blank" or line.indent > item.indent or loose


def _paragraphs(lines: Sequence[Line], text: str) -> list[Sequence[Line]]:
    """Split lines of which each is a paragraph; hard-wrapped lines and verse stay whole."""
    ended = sum(
        bool(_SENTENCE_END.search(text[line.start : line.end].rstrip()[-6:])) for line in lines
    )
    words = sum(len(text[line.start : line.end].split()) for line in lines)
    if ended >= len(lines) - 1 and words >= 10 * len(lines):
        return [[line] for line in lines]
    return [lines]
