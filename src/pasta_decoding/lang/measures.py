"""The measures of parallel decoding, each with one name and one definition.

- plain tokens: tokens of the tag-free text, tokenised alone.
- critical path: forward steps after the prefill that the answer needs at unlimited width.
- tokens per step: plain tokens / critical path.
- ideal speedup: tokens per step of an annotated text, whose critical path is the sum of its
  pieces, with the same number of tokens for every topic.
- repeated chunk: a chunk that shares most of its word pairs with one earlier chunk of its answer.
- rep-4: share of four-word sequences that occurred before in the same text.
- empty item: a list marker without text after it, as in "1. 1. 1." and "- - -".
- echoed chunk: a chunk that shares most of its word pairs with the main text of its answer.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, strip

MOSTLY = 0.5  # "most" is a larger share than this
TAG_TOKENS = 2  # PROMISE_OPEN and PROMISE_CLOSE
TOPIC_TOKENS = 3  # of any topic

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
    """Return the geometric mean of positive ratios; None if there are none."""
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
    """Return the share of four-word sequences that occurred before; 0 for a shorter text."""
    words = text.split()
    grams = list(zip(*(words[start:] for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def empty_items(text: str) -> int:
    """Count the list markers without text after them, anywhere in a line.

    A marker alone in its line is an empty item only if the next line begins with a marker; in the
    last line, if the line before does.
    """
    lines = [[_marker(word) for word in line.split()] for line in text.split("\n") if line.strip()]
    count = 0
    for index, markers in enumerate(lines):
        neighbours = lines[index + 1 : index + 2] or lines[max(0, index - 1) : index]
        in_list = any(neighbour[0] is not None for neighbour in neighbours)
        count += _empty_in_line(markers, in_list=in_list)
    return count


def _marker(word: str) -> str | None:
    """Return the kind of marker that a word is; None for other words."""
    return next((kind for kind, form in _MARKERS.items() if form.fullmatch(word)), None)


def _empty_in_line(kinds: Sequence[str | None], *, in_list: bool) -> int:
    """Count the empty items of a line, given the `_marker` of each of its words."""
    doubled = sum(kind is not None and kind == next_kind for kind, next_kind in pairwise(kinds))
    *before, last = kinds
    if last is None:
        return doubled
    # A marker at the end of a sentence, as in "The answer is 5.", is no item.
    follows_markers = None not in before or before[-1] == last
    if follows_markers and (before or in_list):
        return doubled + 1
    return doubled


def _mostly_in(pairs: set[tuple[str, str]], others: set[tuple[str, str]]) -> bool:
    """Does `others` hold most of `pairs`? False if `pairs` is empty."""
    return len(pairs & others) > MOSTLY * len(pairs)


def _word_pairs(text: str) -> set[tuple[str, str]]:
    words = text.casefold().split()
    return set(pairwise(words))
