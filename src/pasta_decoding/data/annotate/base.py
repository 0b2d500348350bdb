"""What every annotator is: plain rows in, annotated rows out, each as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pasta_decoding.data.dataset import Row


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


class Annotator(Protocol):
    """Annotates rows with plain responses; taking the tags out again gives these exactly."""

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, in whatever order they are done."""
        ...
