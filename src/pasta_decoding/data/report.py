"""What a training set is made of, in figures: rows, lengths, parts, and what they would buy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.measures import geometric_mean, ideal_speedup
from pasta_decoding.lang.tags import has_escape
from pasta_decoding.lang.tree import Chunk, Sync, read, strip


@dataclass(frozen=True, slots=True)
class Measured:
    """One row in figures; lengths in tokens, `ideal_speedup` at unlimited width.

    literal_tags: whether its text speaks of tags, which the text form escapes.
    """

    source: str
    prompt_tokens: int
    plain_tokens: int
    chunk_tokens: tuple[int, ...]
    syncs: int
    literal_tags: bool
    ideal_speedup: float


def measure(row: Row, count_tokens: Callable[[str], int]) -> Measured:
    """Return the figures of one row."""
    tree = read(row.response)
    return Measured(
        source=row.source,
        prompt_tokens=count_tokens(row.asked),
        plain_tokens=count_tokens(strip(tree)),
        chunk_tokens=tuple(count_tokens(node.text) for node in tree if isinstance(node, Chunk)),
        syncs=sum(isinstance(node, Sync) for node in tree),
        literal_tags=has_escape(row.response),
        ideal_speedup=ideal_speedup(tree, count_tokens),
    )


def summary(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures of a set, and of each of its sources."""
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        groups[row.source.partition("/")[0]].append(row)
    return {
        **_figures(rows),
        "sources": {source: _figures(group) for source, group in sorted(groups.items())},
    }


def _figures(rows: Sequence[Measured]) -> dict[str, Any]:
    promising = [row for row in rows if row.chunk_tokens]
    return {
        "rows": len(rows),
        "with_chunk": len(promising),
        "chunks": sum(len(row.chunk_tokens) for row in rows),
        "syncs": sum(row.syncs for row in rows),
        "literal_tags": sum(row.literal_tags for row in rows),
        "prompt_tokens": _spread([row.prompt_tokens for row in rows]),
        "plain_tokens": _spread([row.plain_tokens for row in rows]),
        "chunk_tokens": _spread([tokens for row in rows for tokens in row.chunk_tokens]),
        "ideal_speedup": _rounded(geometric_mean(row.ideal_speedup for row in rows)),
        "ideal_speedup_with_chunk": _rounded(
            geometric_mean(row.ideal_speedup for row in promising)
        ),
    }


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {
        "sum": sum(values),
        "mean": round(fmean(values), 1),
        "p10": cuts[0],
        "p50": cuts[4],
        "p90": cuts[8],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def measure_rows(rows: Iterable[Row], count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return the figures of `rows`."""
    return summary([measure(row, count_tokens) for row in rows])
