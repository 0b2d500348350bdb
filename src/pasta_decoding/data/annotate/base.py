"""What every annotator is: plain rows in, annotated rows out, each as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import Span, show


@dataclass(frozen=True, slots=True)
class Annotated:
    """What became of one row.

    row:      the response in the text form; the plain one if `rejected` says why.
    rejected: why the annotation was not taken; None if it was.
    cost:     what it took, in units named by their keys (`model_tokens`, `requests`, ...).
    """

    row: Row
    rejected: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


def reject(row: Row, reason: str, cost: Mapping[str, float] | None = None) -> Annotated:
    """Return a plain row as it stays: in the text form, in which literal tags are escaped."""
    text = show((Span(row.response),) if row.response else ())
    return Annotated(replace(row, response=text), reason, cost or {})


@dataclass(frozen=True, slots=True)
class RuleAnnotator:
    """A rule as an annotator: no model, nothing rejected, no cost.

    rule: (plain response, `count_tokens`) -> the same in the text form, its parts promised.
    """

    rule: Callable[[str, Callable[[str], int]], str]
    count_tokens: Callable[[str], int]

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, in order."""
        for row in rows:
            response = self.rule(row.response, self.count_tokens)
            yield Annotated(replace(row, response=response))


class Annotator(Protocol):
    """Annotates rows with plain responses; taking the tags out again gives these exactly."""

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, in whatever order they are done."""
        ...
