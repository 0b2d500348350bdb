"""Seams: what gives away that siblings were written without seeing each other.

- mixed markup: items of one list of which some open with a bold title, and others with plain words.
- shared line: a line or sentence of at least five words that two chunks have in common.
- outer items: a chunk inside a list goes on with items of that list, which are not its own.
- partial list: a list of which some items hold chunks and others are main text, with no sync
  between them.
- item count: the prompt asks for a number of items, and the answer's one list has another number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations, groupby

from pasta_decoding.lang.item_requests import requested_items
from pasta_decoding.lang.lists import ItemList, ListItem, read_item, read_lists
from pasta_decoding.lang.tree import Chunk, Tree

MIN_SHARED_WORDS = 5

_CODE = re.compile(r"```.*?(?:```|\Z)", re.S)
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Seams:
    """Which seams an answer has. `item_count` is None where it is unclear what was asked for."""

    mixed_markup: bool
    shared_lines: bool
    outer_items: bool
    partial_list: bool
    item_count: bool | None

    @property
    def names(self) -> list[str]:
        """The seams that it has, by the names of the fields."""
        return [field.name for field in fields(self) if getattr(self, field.name)]


def find_seams(prompt: str, tree: Tree) -> Seams:
    """Return the seams of the answer `tree` to `prompt`."""
    chunks = [node.text for node in tree if isinstance(node, Chunk)]
    lists = read_lists(tree)
    return Seams(
        mixed_markup=any(map(_is_mixed, lists)),
        shared_lines=bool(shared_lines(chunks)),
        outer_items=any(_outer_items(items, chunks) for items in lists),
        partial_list=any(map(_is_partial, lists)),
        item_count=_is_miscounted(prompt, lists, chunks),
    )


def shared_lines(chunks: Sequence[str]) -> set[str]:
    """Return the lines and sentences that two chunks share, without markup and punctuation."""
    lines = [_lines(text) for text in chunks]
    return set[str]().union(*(first & second for first, second in combinations(lines, 2)))


def _is_mixed(siblings: ItemList) -> bool:
    openings = {item.opening for item in siblings.items}
    return openings >= {"lead-in", "plain"}


def _lines(text: str) -> set[str]:
    """Return the lines and sentences of `text` that are long enough, as their words alone."""
    lines = set()
    for line in _CODE.sub("", text).split("\n"):
        for sentence in (line, *_SENTENCE_END.split(line)):
            words = _WORD.findall(sentence.casefold())
            if len(words) >= MIN_SHARED_WORDS:
                lines.add(" ".join(words))
    return lines


def _outer_items(siblings: ItemList, chunks: Sequence[str]) -> int:
    """Count the further items of the list that its items' chunks contain. An item has one chunk.

    It is 0 for a list of one item: there, one chunk may hold the whole list.
    """
    if len(siblings.items) == 1:
        return 0
    return sum(
        _further_items(item, chunks[index])
        for item in siblings.items
        for index in (*item.chunks, *item.inner_chunks)
    )


def _further_items(item: ListItem, text: str) -> int:
    """Count the items of `text`, a chunk inside `item`, that are siblings of `item`."""
    lines = _CODE.sub("", text).split("\n")[1:]
    others = [other for other in map(read_item, lines) if other and item.may_precede(other)]
    continues = others and (item.number is None or others[0].number == item.number + 1)
    return len(others) if continues else 0


def _is_partial(siblings: ItemList) -> bool:
    if siblings.items[0].kind == "heading":  # sections differ more than items do
        return False
    for _, items in groupby(siblings.items, key=lambda item: item.syncs):
        group = list(items)
        is_parallel = any(item.chunks for item in group)
        if is_parallel and not all(item.chunks or item.inner_chunks for item in group):
            return True
    return False


def _is_miscounted(prompt: str, lists: Sequence[ItemList], chunks: Sequence[str]) -> bool | None:
    limits = requested_items(prompt)
    if limits is None:
        return None
    counts = [
        len(siblings.items) + _outer_items(siblings, chunks)
        for siblings in lists
        if siblings.depth == 0 and len(siblings.items) > 1
    ]
    if len(counts) != 1:  # prose, or several lists: it is unclear which one the prompt means
        return None
    return not limits[0] <= counts[0] <= limits[1]
