"""The lists of an answer as its main thread wrote them, and which item holds which chunk.

A line that a chunk begins is no item here: it belongs to the item that the main thread had begun.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree

_ITEM = re.compile(
    r"(?P<indent>[ \t]*)(?P<heading>#{1,6} +)?"
    r"(?:(?P<bullet>[-+*\u2022\u2013])|(?P<bold>\*\*)?(?P<number>\d{1,3})[.)])\s+(?P<words>.*)"
)
_TITLE = re.compile(r"\s*(?:#{1,6} |(?:\*\*|__)[^*_]+(?:\*\*|__):?\s*$)")
_LEAD_IN = re.compile(r"\*{1,3}[^*]+(?:[:.!?]\*|\*{1,3}\s*(?:$|[:(\u2013\u2014-]))")
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True, slots=True)
class ListItem:
    """One item.

    kind:         what its marker is; "heading" is a numbered heading.
    indent:       columns in front of its marker.
    number:       None for a bullet.
    opening:      "lead-in" is a bold title in front of the text, "bold" other bold or italic words.
    syncs:        how many syncs come before its words.
    chunks:       which chunks its own text holds: their places among the answer's, from 0.
    inner_chunks: the same of its sub-items.
    """

    kind: Literal["bullet", "number", "heading"]
    indent: int
    number: int | None
    opening: Literal["plain", "bold", "lead-in"]
    syncs: int
    chunks: list[int] = field(default_factory=list)
    inner_chunks: list[int] = field(default_factory=list)

    def may_precede(self, item: "ListItem") -> bool:
        """Could `item` stand behind this one in the same list?"""
        if (self.kind, self.indent) != (item.kind, item.indent):
            return False
        return item.number != 1 or self.number == 1  # some number every item 1

    def may_hold(self, item: "ListItem") -> bool:
        """Could `item` be a sub-item of this one?"""
        if self.indent != item.indent:
            return self.indent < item.indent
        # Bullets under a number are often not indented, and nothing under a heading is.
        kinds = ("heading", "number", "bullet")
        return kinds.index(self.kind) < kinds.index(item.kind)


@dataclass(frozen=True, slots=True)
class ItemList:
    """Items of one level in order. `depth` is how many lists it is inside of."""

    depth: int
    items: list[ListItem]


@dataclass(slots=True)
class _Line:
    """A line that the main thread began, up to the first line break in a chunk.

    syncs:  how many come before its words.
    chunks: those that begin in it, by their places among the answer's.
    """

    syncs: int
    text: str = ""
    chunks: list[int] = field(default_factory=list)
    is_open: bool = True

    def write(self, text: str) -> None:
        if self.is_open:
            first, line_break, _ = text.partition("\n")
            self.text += first
            self.is_open = not line_break


def read_lists(tree: Tree) -> list[ItemList]:
    """Return the lists in the order of their first items."""
    lists: list[ItemList] = []
    levels: list[ItemList] = []
    behind_blank = False
    for line in _without_code(_main_lines(tree)):
        if item := read_item(line.text, line.syncs):
            levels = _add(item, lists, levels)
        elif _is_outside(line.text, behind_blank=behind_blank):
            levels = []
        behind_blank = not line.text.strip()
        for level in levels[:-1]:
            level.items[-1].inner_chunks.extend(line.chunks)
        for level in levels[-1:]:
            level.items[-1].chunks.extend(line.chunks)
    return lists


def read_item(line: str, syncs: int = 0) -> ListItem | None:
    """Return the item that a line begins; None if it begins none."""
    match = _ITEM.match(line)
    if match is None:
        return None
    opening = _opening((match["bold"] or "") + match["words"])
    indent = len(match["indent"].expandtabs(4))
    if match["number"] is None:
        return ListItem("bullet", indent, None, opening, syncs)
    kind: Literal["number", "heading"] = "heading" if match["heading"] else "number"
    return ListItem(kind, indent, int(match["number"]), opening, syncs)


def _opening(words: str) -> Literal["plain", "bold", "lead-in"]:
    if _LEAD_IN.match(words):
        return "lead-in"
    return "bold" if words.startswith("*") else "plain"


def _main_lines(tree: Tree) -> Iterator[_Line]:
    syncs = 0
    chunks = 0
    line = _Line(syncs)
    for node in tree:
        match node:
            case Span(text):
                first, *others = text.split("\n")
                line.write(first)
                for other in others:
                    yield line
                    line = _Line(syncs, other)
            case Chunk(text=text):
                line.chunks.append(chunks)
                line.write(text)
                chunks += 1
            case Sync():
                syncs += 1
                if not _LETTER.search(line.text):
                    line.syncs = syncs
    yield line


def _without_code(lines: Iterator[_Line]) -> Iterator[_Line]:
    in_code = False
    for line in lines:
        if line.text.lstrip().startswith("```") and not line.chunks:
            in_code = not in_code
        elif not in_code:
            yield line


def _add(item: ListItem, lists: list[ItemList], levels: list[ItemList]) -> list[ItemList]:
    """Add `item` to the innermost open list that it continues, or begin a list with it.

    Returns the lists that are open now. A number tells where a list goes on behind a paragraph.
    """
    for depth, level in reversed(list(enumerate(levels))):
        if level.items[-1].may_precede(item):
            level.items.append(item)
            return levels[: depth + 1]
    for level in lists[-1:]:
        if not levels and item.number and level.items[-1].number == item.number - 1:
            level.items.append(item)
            return [level]
    holders = [level for level in levels if level.items[-1].may_hold(item)]
    lists.append(ItemList(len(holders), [item]))
    return [*holders, lists[-1]]


def _is_outside(line: str, *, behind_blank: bool) -> bool:
    """Does a line that begins no item end the lists before it?"""
    if not line.strip() or line[0].isspace():
        return False
    return behind_blank or _TITLE.match(line) is not None
