"""How far two annotations of the same responses agree.

- exact-chunk F1: a chunk is found if the other annotation has one that begins and ends at the same
  characters of the plain text.
- unit F1: units are the sentences of three words or more; a unit counts if most of it is inside of
  a chunk, whichever. This asks what is written in parallel, not where it is cut.
- token agreement: share of tokens of the plain text that both leave to the main thread or both put
  into a chunk.
- sync F1: a sync is found if the other has one at the same place, white space aside.
- ideal speedup: geometric mean, see `lang.measures`.

F1 values and the token agreement are of all rows taken together (micro averages). Intervals are
95 % percentile bootstrap intervals over rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from pasta_decoding.data.annotate.hiding import HidingCost
from pasta_decoding.data.annotate.outline import outline
from pasta_decoding.data.annotate.structure import sentences
from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import FloatArray, Interval, interval
from pasta_decoding.lang.measures import ideal_speedup
from pasta_decoding.lang.tree import (
    Chunk,
    Extent,
    Node,
    Span,
    Sync,
    Tree,
    chunk_extents,
    read,
    strip,
)

TokenEnds = Callable[[str], Sequence[int]]
"""Tells where the tokens of a text end, in characters."""

UNIT_MIN_WORDS = 3  # fewer are titles and labels
RULE_MIN_WORDS = 10
_LINE = re.compile(r"[^\n]+")


@dataclass(frozen=True, slots=True)
class Agreement:
    """The measures of this module; speedups are those of the annotation and of the gold one."""

    exact_chunk_f1: Interval
    unit_f1: Interval
    token_agreement: Interval
    sync_f1: Interval
    ideal_speedup: Interval
    ideal_speedup_gold: Interval


def match(gold: Iterable[Row], annotated: Iterable[Row]) -> list[tuple[Tree, Tree]]:
    """Return both annotations of every response that has two, in gold's order.

    Raises PastaError if none has two, or if two of the same id are not of the same response.
    """
    others = {row.id: read(row.response) for row in annotated}
    pairs = []
    for row in gold:
        if row.id in others:
            pair = (read(row.response), others[row.id])
            if strip(pair[0]) != strip(pair[1]):
                message = f"the annotations of {row.id!r} are not of the same response"
                raise PastaError(message, hint="Annotate the gold file with its tags taken out.")
            pairs.append(pair)
    if not pairs:
        raise PastaError("no row is in both files", hint="Rows are matched by their id.")
    return pairs


def agreement(pairs: Sequence[tuple[Tree, Tree]], token_ends: TokenEnds) -> Agreement:
    """Compare annotations (second) with those that are thought right (first)."""
    counts_NK = np.array([_counts(gold, other, token_ends) for gold, other in pairs])
    return Agreement(*(interval(counts_NK, measure) for measure in _MEASURES))


def hiding_nats(costs: Sequence[HidingCost]) -> Interval:
    """Return what hiding its siblings adds to a token of a chunk (nats), over all rows together."""
    sums = [(cost.hidden - cost.seen, cost.chunk_tokens) for cost in costs]
    return interval(sums, _ratio(0, 1))


def layout_rule(tree: Tree) -> Tree:
    """Return what a plain layout rule makes of the response: the floor for any annotator.

    List items if there are two, else paragraphs behind the first if there are three; those of ten
    words or more are chunks.
    """
    text = strip(tree)
    layout = outline(text)
    parts = [block for block in layout if block.kind == "item"]
    if len(parts) < 2:
        parts = [block for block in layout if block.kind == "text"]
        parts = parts[1:] if len(parts) > 2 else []
    nodes: list[Node] = []
    at = 0
    for part in parts:
        body = text[part.body : part.end].rstrip()
        if len(body.split()) >= RULE_MIN_WORDS:
            nodes += [Span(text[at : part.body])] if part.body > at else []
            nodes.append(Chunk("part", 10, body))
            at = part.body + len(body)
    return (*nodes, *([Span(text[at:])] if text[at:] else []))


def sync_places(tree: Tree) -> set[int]:
    """Return how many characters that are not white space stand before each sync."""
    places = set()
    at = 0
    for node in tree:
        if isinstance(node, Sync):
            places.add(at)
        else:
            at += len("".join(node.text.split()))
    return places


def units(text: str) -> list[Extent]:
    """Return where the sentences of every line stand; a line break ends one, too."""
    found = []
    for line in _LINE.finditer(text):
        for start, end in sentences(text, *line.span()):
            body = text[start:end]
            first = start + len(body) - len(body.lstrip())
            if len(body.split()) >= UNIT_MIN_WORDS:
                found.append((first, first + len(body.strip())))
    return found


def _counts(gold: Tree, other: Tree, token_ends: TokenEnds) -> list[float]:
    """Return what `_MEASURES` need of one row: found, both sums; ...; logarithms of speedups."""
    text = strip(gold)
    ends = token_ends(text)
    chunks = [set(chunk_extents(tree)) for tree in (gold, other)]
    inside = [_units_inside(units(text), extents) for extents in chunks]
    syncs = [sync_places(tree) for tree in (gold, other)]
    in_chunk = [_tokens_inside(ends, extents) for extents in chunks]
    same = sum(left == right for left, right in zip(*in_chunk, strict=True))
    speedups = [ideal_speedup(tree, lambda part: len(token_ends(part))) for tree in (other, gold)]
    return [
        *_shared(*chunks),
        *_shared(*inside),
        same,
        len(ends),
        *_shared(*syncs),
        *(log(speedup) for speedup in speedups),
        1,
    ]


def _shared(left: set[Any], right: set[Any]) -> tuple[int, int]:
    """Return what an F1 is made of: twice the common ones, and all of both."""
    return 2 * len(left & right), len(left) + len(right)


def _units_inside(all_units: Sequence[Extent], chunks: set[Extent]) -> set[Extent]:
    def most_of_it(unit: Extent) -> bool:
        common = (min(unit[1], end) - max(unit[0], start) for start, end in chunks)
        return 2 * sum(max(0, size) for size in common) > unit[1] - unit[0]

    return {unit for unit in all_units if most_of_it(unit)}


def _tokens_inside(ends: Sequence[int], chunks: set[Extent]) -> list[bool]:
    # By its last character: a token often begins with the space that separates it.
    return [any(start < end <= stop for start, stop in chunks) for end in ends]


def _ratio(above: int, below: int) -> Callable[[FloatArray], FloatArray]:
    return lambda sums: sums[..., above] / sums[..., below]


def _geometric(column: int) -> Callable[[FloatArray], FloatArray]:
    return lambda sums: np.exp(sums[..., column] / sums[..., -1])


_MEASURES = (_ratio(0, 1), _ratio(2, 3), _ratio(4, 5), _ratio(6, 7), _geometric(8), _geometric(9))
"""The fields of `Agreement` from sums over rows of what `_counts` returns."""
