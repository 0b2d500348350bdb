"""What every annotator is: plain rows in, annotated rows out, each as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.tree import Chunk, Node, Span, show, valid_tokens, valid_topic


@dataclass(frozen=True, slots=True)
class Annotated:
    """What became of one row.

    row:      the response in the text form; the plain one if `rejected` says why.
    rejected: why the annotation was not taken; None if it was.
    cost:     what it took, in units named by their keys (`requests`, `prompt_tokens`, ...).
    """

    row: Row
    rejected: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


Annotate = Callable[[Iterable[Row]], Iterator[Annotated]]
"""An annotator: one result a plain row, in whatever order they are done.

Taking the tags out again gives the responses exactly.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a response, `[start, end)`, that can be written by itself.

    topic: what its promise says; None for a promise without a topic.
    """

    start: int
    end: int
    topic: str | None = None


FindParts = Callable[[str], Iterable[Part]]
"""A rule: the parts of a plain response in order. `pasta annotate --with module:function`."""


def reject(row: Row, reason: str, cost: Mapping[str, float] | None = None) -> Annotated:
    """Return a plain row as it stays: in the text form, in which literal tags are escaped."""
    text = show((Span(row.response),) if row.response else ())
    return Annotated(replace(row, response=text), reason, cost or {})


def by_rule(find_parts: FindParts, count_tokens: Callable[[str], int]) -> Annotate:
    """Return a rule as an annotator. It raises PastaError for parts that are none."""

    def annotate(rows: Iterable[Row]) -> Iterator[Annotated]:
        for row in rows:
            tree = tuple(_promised(row, find_parts(row.response), count_tokens))
            yield Annotated(replace(row, response=show(tree)))

    return annotate


def _promised(
    row: Row, parts: Iterable[Part], count_tokens: Callable[[str], int]
) -> Iterator[Node]:
    """Yield the response with its parts as chunks, their lengths counted, the rest as main text."""
    text, at = row.response, 0
    for part in parts:
        if not at <= part.start < part.end <= len(text):
            raise PastaError(
                f"row {row.id!r}: the part {part.start}:{part.end} is empty, overlaps the one "
                f"before it, or ends behind the response"
            )
        if part.topic != valid_topic(part.topic):
            raise PastaError(f"row {row.id!r}: {part.topic!r} is no topic")
        if part.start > at:
            yield Span(text[at : part.start])
        body = text[part.start : part.end]
        yield Chunk(part.topic, valid_tokens(max(1, count_tokens(body))), body)
        at = part.end
    if at < len(text):
        yield Span(text[at:])
