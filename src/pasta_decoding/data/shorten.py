"""A long answer made shorter without breaking it off: every part keeps its first sentences.

A small model that is shown answers of 900 tokens learns to ramble. Cut at a limit they have no
end; shortened part by part they are whole answers of a length that it can finish.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from pasta_decoding.data.annotate.structure import ABBREVIATION
from pasta_decoding.lang.tree import Chunk, Node, Tree, strip, valid_tokens

SENTENCES = (None, 4, 3, 2)
"""How many first sentences a chunk keeps, tried in this order; None: all."""

# Three letters before the mark, or two digits; abbreviations and markers of lists are no ends.
_SENTENCE_END = re.compile(r"(?:(?<=[a-z][a-z][a-z)\"][.!?])|(?<=\d\d[.!?]))(?=\s|$)")


def shorten(tree: Tree, count_tokens: Callable[[str], int], max_tokens: int) -> Tree:
    """Return `tree` with less text in its chunks, so that its plain text has `max_tokens` at most.

    Of the forms that fit, the one that says most about every part; where even two sentences a
    chunk are too many, the answer ends behind its last chunk that fits. Empty if none does.
    """
    for sentences in SENTENCES:
        short = tuple(first_sentences(node, sentences, count_tokens) for node in tree)
        if count_tokens(strip(short)) <= max_tokens:
            return short
    chunks = [place for place, node in enumerate(short) if isinstance(node, Chunk)]
    fitting = [place for place in chunks if count_tokens(strip(short[: place + 1])) <= max_tokens]
    return short[: fitting[-1] + 1] if fitting else ()


def sentence_ends(text: str) -> list[int]:
    """Return where the sentences of a chunk end, in characters."""
    ends = (found.end() for found in _SENTENCE_END.finditer(text))
    return [
        end for end in ends if not ABBREVIATION.search(text[text.rfind("\n", 0, end) + 1 : end])
    ]


def first_sentences(node: Node, sentences: int | None, count_tokens: Callable[[str], int]) -> Node:
    """Return a chunk with its first so many sentences, and the promise of that; None keeps all."""
    if not isinstance(node, Chunk) or sentences is None:
        return node
    ends = sentence_ends(node.text)
    text = node.text[: ends[sentences - 1]] if len(ends) >= sentences else node.text
    return replace(node, text=text, tokens=valid_tokens(count_tokens(text)))
