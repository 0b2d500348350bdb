"""The measures of parallel decoding, each with one name and one definition.

- plain tokens: tokens of the tag-free text, tokenised alone.
- critical path: forward steps after the prefill that the answer needs at unlimited width.
- own speedup: plain tokens / critical path.
- ideal speedup: the same of an annotated text, whose critical path is counted from its pieces
  with the same number of tokens for every topic.
- repeated chunk: one most of whose word pairs a sibling of the same answer has too.
- repeated grams: share of runs of four words that occurred before in the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, strip

MOSTLY = 0.5
TAG_TOKENS = 2  # opening and closing of a promise, as control tokens write it,
TOPIC_TOKENS = 3  # and its topic


def own_speedup(plain_tokens: int, critical_path: int) -> float:
    """Return plain tokens / critical path; 1 for an answer that needed no step."""
    return plain_tokens / critical_path if critical_path and plain_tokens else 1.0


def ideal_speedup(tree: Tree, count_tokens: Callable[[str], int]) -> float:
    """Return plain tokens / critical path of an annotated text; 1 for an empty one."""
    main = 0
    ends = [0]
    for node in tree:
        match node:
            case Span(text):
                main += count_tokens(text)
            case Chunk(topic, _, text):
                main += TAG_TOKENS + (TOPIC_TOKENS if topic else 0)
                ends.append(main + count_tokens(text))
            case Sync():
                main = max(main, *ends) + 1
    return own_speedup(count_tokens(strip(tree)), max(main, *ends))


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def repeated_chunks(tree: Tree) -> int:
    """Count the chunks more than half of whose word pairs occur in an earlier sibling."""
    return len(repetitions(tree))


def repetitions(tree: Tree) -> list[int]:
    """Return which chunks are repeated ones: their places among the chunks, from 0."""
    pairs = [_word_pairs(node.text) for node in tree if isinstance(node, Chunk)]
    return [
        place
        for place, own in enumerate(pairs)
        if own and any(len(own & other) > MOSTLY * len(own) for other in pairs[:place])
    ]


def repeated_grams(text: str, n: int = 4) -> float:
    """Return the share of runs of `n` words that occurred before; 0 of a shorter text."""
    words = text.split()
    grams = list(zip(*(words[start:] for start in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _word_pairs(text: str) -> set[tuple[str, str]]:
    words = text.casefold().split()
    return set(pairwise(words))
