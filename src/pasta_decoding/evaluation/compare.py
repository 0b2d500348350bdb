"""Two checkpoints on the same prompts: what moved, with paired bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import FloatArray, Interval, interval
from pasta_decoding.evaluation.records import Record

Pair = tuple[Record, Record]


def paired(first: Sequence[Record], second: Sequence[Record]) -> list[Pair]:
    """Return the records of both prompt by prompt. Raises PastaError if the prompts differ."""
    other = {record.instruction: record for record in second}
    missing = {record.instruction for record in first} ^ other.keys()
    if missing:
        raise PastaError(
            f"{len(missing)} prompts are in one file only, such as {min(missing)[:60]!r}",
            hint="Compare records of the same prompts.",
        )
    return [(record, other[record.instruction]) for record in first]


def compare(pairs: Sequence[Pair], quality: Mapping[str, Sequence[float]] | None = None) -> Figures:
    """Return every figure as first, second, and how the second stands to the first.

    quality: of each prompt, that of the first and of the second answer, larger is better.
    """
    done = [pair for pair in pairs if not (pair[0].error or pair[1].error)]
    ended = [pair for pair in done if not (pair[0].hit_limit or pair[1].hit_limit)]
    figures = {
        "own_speedup": _ratio([_logs(pair) for pair in done]),
        "plain_tokens_finished": _ratio_of_means(
            [(a.plain_tokens, b.plain_tokens) for a, b in ended]
        ),
        "hit_limit": _difference([(a.hit_limit, b.hit_limit) for a, b in done]),
        "repeated_chunks": _difference_of_shares(
            [(a.repeated_chunks, a.chunks, b.repeated_chunks, b.chunks) for a, b in done]
        ),
        "near_promises": _difference_of_shares(
            [(a.near_promises, len(a.promises), b.near_promises, len(b.promises)) for a, b in done]
        ),
    }
    if quality is not None:
        rated = [quality[a.instruction] for a, _ in done if a.instruction in quality]
        figures["quality"] = _difference(rated)
    failures = {"failures": sum(bool(a.error or b.error) for a, b in pairs)}
    return {"prompts": len(pairs), **failures, **figures}


Figures = dict[str, Any]


def _logs(pair: Pair) -> tuple[float, float]:
    return float(np.log(pair[0].own_speedup)), float(np.log(pair[1].own_speedup))


def _ratio(logs: Sequence[tuple[float, float]]) -> Figures | None:
    """Geometric means, and the second's over the first's."""
    if not logs:
        return None
    rows = [(a, b, 1.0) for a, b in logs]
    first, second = np.exp(np.mean(logs, axis=0))
    change = interval(rows, lambda sums: np.exp((sums[..., 1] - sums[..., 0]) / sums[..., 2]))
    return _figure(first, second, change, "ratio", 1.0)


def _ratio_of_means(values: Sequence[tuple[float, float]]) -> Figures | None:
    if not values:
        return None
    first, second = np.mean(values, axis=0)
    change = interval(values, lambda sums: sums[..., 1] / sums[..., 0])
    return _figure(first, second, change, "ratio", 1.0) | {"of": len(values)}


def _difference(values: Sequence[Sequence[float]]) -> Figures | None:
    if not values:
        return None
    first, second = np.mean(np.asarray(values, dtype=np.float64), axis=0)
    rows = [(float(a), float(b), 1.0) for a, b in values]
    change = interval(rows, lambda sums: (sums[..., 1] - sums[..., 0]) / sums[..., 2])
    return _figure(first, second, change, "difference", 0.0)


def _difference_of_shares(parts: Sequence[tuple[int, int, int, int]]) -> Figures | None:
    totals = np.sum(parts, axis=0) if parts else np.zeros(4)
    if not totals[1] or not totals[3]:
        return None

    def difference(sums: FloatArray) -> FloatArray:
        return sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1]

    first, second = totals[0] / totals[1], totals[2] / totals[3]
    return _figure(first, second, interval(parts, difference), "difference", 0.0)


def _figure(first: float, second: float, change: Interval, kind: str, null: float) -> Figures:
    return {
        "first": float(first),
        "second": float(second),
        kind: asdict(change) | {"excludes_no_change": change.excludes(null)},
    }
