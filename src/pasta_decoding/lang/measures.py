"""The measures of parallel decoding, each with one name and one definition.

- plain tokens: tokens of the tag-free text, tokenised alone.
- critical path: forward steps after the prefill that the answer needs at unlimited width.
- own speedup: plain tokens / critical path.
- repeated chunk: one most of whose word pairs a sibling of the same answer has too.
- repeated grams: share of a text's runs of n words that stand in it before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from pasta_decoding.lang.tree import Chunk, Tree

MOSTLY = 0.5


def own_speedup(plain_tokens: int, critical_path: int) -> float:
    """Return plain tokens / critical path; 1 for an answer that needed no step."""
    return plain_tokens / critical_path if critical_path and plain_tokens else 1.0


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def repeated_chunks(tree: Tree) -> int:
    """Count the chunks more than half of whose word pairs occur in an earlier sibling."""
    seen: list[set[tuple[str, str]]] = []
    repeated = 0
    for node in tree:
        if isinstance(node, Chunk):
            pairs = _word_pairs(node.text)
            repeated += any(len(pairs & other) > MOSTLY * len(pairs) for other in seen if pairs)
            seen.append(pairs)
    return repeated


def repeated_grams(text: str, n: int = 4) -> float:
    """Return the share of runs of `n` words that occurred before; 0 of a shorter text."""
    words = text.split()
    grams = list(zip(*(words[start:] for start in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _word_pairs(text: str) -> set[tuple[str, str]]:
    words = text.casefold().split()
    return set(pairwise(words))
