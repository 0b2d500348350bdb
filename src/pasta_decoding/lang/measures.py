"""The measures of parallel decoding, each with one name and one definition.

- plain tokens: tokens of the tag-free text, tokenised alone.
- critical path: forward steps after the prefill that the answer needs at unlimited width.
- tokens per step: plain tokens / critical path.
- ideal speedup: the same of an annotated text, whose critical path is counted from its pieces
  with the same number of tokens for every topic.
- repeated chunk: one most of whose word pairs a sibling of the same answer has too.
- rep-4: share of runs of four words that occurred before in the same text.
- empty item: a marker of a list without text behind it, as in "1. 1. 1." and "- - -".
- echoed chunk: one most of whose word pairs the main text of the same answer has too.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, strip

MOSTLY = 0.5
TAG_TOKENS = 2  # opening and closing of a promise, as control tokens write it,
TOPIC_TOKENS = 3  # and its topic

_MARKERS = {"bullet": re.compile(r"[-*+\u2022]"), "number": re.compile(r"\d{1,3}[.)]")}


def tokens_per_step(plain_tokens: int, critical_path: int) -> float:
    """Return plain tokens / critical path; 1 for an answer without a token or a step."""
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
    return tokens_per_step(count_tokens(strip(tree)), max(main, *ends))


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def repetitions(tree: Tree) -> list[int]:
    """Return the indices, among the chunks, of those that repeat an earlier one."""
    chunks = [_word_pairs(node.text) for node in tree if isinstance(node, Chunk)]
    return [
        index
        for index, chunk in enumerate(chunks)
        if any(_mostly_in(chunk, sibling) for sibling in chunks[:index])
    ]


def echoes(tree: Tree) -> list[int]:
    """Return the indices, among the chunks, of those that echo the main text."""
    main: set[tuple[str, str]] = set()
    for node in tree:
        if isinstance(node, Span):
            main |= _word_pairs(node.text)
    chunks = [_word_pairs(node.text) for node in tree if isinstance(node, Chunk)]
    return [index for index, chunk in enumerate(chunks) if _mostly_in(chunk, main)]


def rep_4(text: str) -> float:
    """Return the share of runs of four words that occurred before; 0 of a shorter text."""
    words = text.split()
    grams = list(zip(*(words[start:] for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def empty_items(text: str) -> int:
    """Count the markers of lists without text behind them, wherever they stand.

    One that stands alone in its line is one of a list only beside another item's line, and its
    text may stand in the next one.
    """
    kinds = [[_marker(word) for word in line.split()] for line in text.split("\n") if line.strip()]
    around: list[list[str | None]] = [[None], *kinds, []]
    return sum(
        _empty_in_line(line, in_list=(behind or before)[0] is not None)
        for before, line, behind in zip(around, kinds, around[2:], strict=False)
    )


def _marker(word: str) -> str | None:
    return next((kind for kind, form in _MARKERS.items() if form.fullmatch(word)), None)


def _empty_in_line(kinds: Sequence[str | None], *, in_list: bool) -> int:
    """Count the empty items of a line whose words are these markers, None for other words."""
    doubled = sum(kind is not None and kind == next_kind for kind, next_kind in pairwise(kinds))
    *others, last = kinds
    ends_in_marker = last is not None and (others[-1:] == [last] or None not in others)
    return doubled + int(ends_in_marker and (bool(others) or in_list))


def _mostly_in(pairs: set[tuple[str, str]], others: set[tuple[str, str]]) -> bool:
    """Does `others` hold most of `pairs`? False if there are none."""
    return len(pairs & others) > MOSTLY * len(pairs)


def _word_pairs(text: str) -> set[tuple[str, str]]:
    words = text.casefold().split()
    return set(pairwise(words))
