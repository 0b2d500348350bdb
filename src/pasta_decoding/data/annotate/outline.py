"""The layout of a plain response: headings, list items, paragraphs, code, and their places.

Every character offset counts from the start of the response. What becomes a chunk is decided
by `structure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["blank", "heading", "item", "code", "table", "text"]

# Each is matched from a line's first character that is not white space to its last.
_TABLE = re.compile(r"\|.*\|$|\+?[-=+|]{5,}$")
_LEAD_IN = r"(?!.*\b(?:are|is|include|includes|following|follows|these|here|can|how to)\b)"
_HEADING = re.compile(
    r"#{1,6}\s+(?=\S)|(?=(?:\*\*|__)[^*_]{1,80}(?:\*\*|__)\s?:?$|(?:Title|Headline): "
    rf"|{_LEAD_IN}[A-Z][^.!?:|]{{1,50}}:$)"
)
_ITEM = re.compile(
    r"(?:(?P<number>\d{1,3})[.)]|\(?[a-z]\)|[-*+\u2022\xb7\u2013\u25aa\u25e6])\s+(?=\S)"
)
_PARAGRAPH_END = re.compile(r"[.:!?][\"'\u201d\u2019)\]*]{0,4}$")


PARAGRAPH_WORDS = 10  # a line that has them, and ends with a sentence, is a paragraph


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that belong together, `[start, end)`; an item holds its sub-items.

    body: where the text begins, behind marker or hashes.
    """

    kind: Kind
    start: int
    body: int
    end: int
    indent: int = 0
    numbered: bool = False


def outline(text: str) -> list[Block]:
    """Return the blocks of `text` in order, white space between them left out."""
    found: list[Block] = []
    gap = False
    for line in _lines(text):
        if line.kind != "blank":
            if found and _continues(text, found[-1], line, gap=gap):
                found[-1] = replace(found[-1], end=line.end)
            else:
                found.append(line)
        gap = line.kind == "blank"
    return found


def _lines(text: str) -> Iterator[Block]:
    start, in_code = 0, False
    for raw in text.split("\n"):
        fence = raw.lstrip().startswith(("```", "~~~"))
        line = _line(raw, start)
        yield replace(line, kind="code") if in_code or fence else line
        in_code ^= fence
        start += len(raw) + 1


def _line(raw: str, start: int) -> Block:
    shown, end = raw.strip(), start + len(raw)
    indent = len(raw) - len(raw.lstrip())
    body = start + indent
    if not shown:
        return Block("blank", start, end, end)
    if _TABLE.match(shown):
        return Block("table", start, body, end, indent)
    if item := _ITEM.match(shown):
        return Block("item", start, body + item.end(), end, indent, item["number"] is not None)
    if heading := _HEADING.match(shown):
        return Block("heading", start, body + heading.end(), end, indent)
    return Block("text", start, body, end, indent)


def _continues(text: str, block: Block, line: Block, *, gap: bool) -> bool:
    """Does a line belong to the block before it? `gap`: there is a blank line between them."""
    deeper = line.indent > block.indent
    if block.kind == "item":
        if line.kind == "item":
            return deeper or (block.numbered and not line.numbered)
        return deeper or (not gap and line.kind != "heading")
    if line.kind != block.kind or line.kind == "heading" or (gap and line.kind != "code"):
        return False
    if line.kind != "text":
        return True
    before = text[text.rfind("\n", 0, block.end) + 1 : block.end].rstrip()
    return len(before.split()) < PARAGRAPH_WORDS or not _PARAGRAPH_END.search(before)
