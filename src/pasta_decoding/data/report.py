"""What a training set is made of, in figures: rows, lengths, parts, and what they would buy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, quantiles
from typing import Any

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.measures import geometric_mean, ideal_speedup
from pasta_decoding.lang.tags import has_escape
from pasta_decoding.lang.tree import Chunk, Sync, read, strip


def measure_rows(rows: Iterable[Row], count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return the figures of a set, and of each of its sources; lengths are in tokens."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row.source.partition("/")[0]].append(_measured(row, count_tokens))
    sources = {source: _figures(group) for source, group in sorted(groups.items())}
    return _figures([one for group in groups.values() for one in group]) | {"sources": sources}


def _measured(row: Row, count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return one row in figures; `literal_tags`: its text speaks of tags, which are escaped."""
    tree = read(row.response)
    return {
        "prompt_tokens": count_tokens(row.asked),
        "plain_tokens": count_tokens(strip(tree)),
        "chunk_tokens": [count_tokens(node.text) for node in tree if isinstance(node, Chunk)],
        "syncs": sum(isinstance(node, Sync) for node in tree),
        "literal_tags": has_escape(row.response),
        "ideal_speedup": ideal_speedup(tree, count_tokens),
    }


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    promising = [row for row in rows if row["chunk_tokens"]]
    chunk_tokens = [tokens for row in rows for tokens in row["chunk_tokens"]]
    return {
        "rows": len(rows),
        "with_chunk": len(promising),
        "chunks": len(chunk_tokens),
        "syncs": sum(row["syncs"] for row in rows),
        "literal_tags": sum(row["literal_tags"] for row in rows),
        "prompt_tokens": _spread([row["prompt_tokens"] for row in rows]),
        "plain_tokens": _spread([row["plain_tokens"] for row in rows]),
        "chunk_tokens": _spread(chunk_tokens),
        "ideal_speedup": _speedup(rows),
        "ideal_speedup_with_chunk": _speedup(promising),
    }


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    mean = round(fmean(values), 1)
    return {"sum": sum(values), "mean": mean, "p10": cuts[0], "p50": cuts[4], "p90": cuts[8]}


def _speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    found = geometric_mean(row["ideal_speedup"] for row in rows)
    return None if found is None else round(found, 3)
