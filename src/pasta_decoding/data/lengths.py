"""One answer at several lengths, so that what a promise says is how long its chunk becomes.

In answers as they come, length follows from the topic, and a model learns to pass over what was
promised. Here an answer stands several times: as it is, and with its chunks cut behind their first
sentence, their second, their third. Prompt, topics and first words are the same; only the promised
lengths tell how far each chunk goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.shorten import first_sentences, sentence_ends
from pasta_decoding.lang.tree import Chunk, Sync, Tree, read, show, strip

SENTENCES = (1, 2, 3)
LONG_SHARE = 0.6
"""This share of an answer's chunks, and two at least, must have more than one sentence."""


def at_lengths(rows: Iterable[Row], count_tokens: Callable[[str], int]) -> Iterator[Row]:
    """Yield each row at all its lengths, the longest first; ids get the number of sentences behind.

    Left out are rows whose chunks are short, and those with a sync, whose text may need what would
    be cut.
    """
    for row in rows:
        tree = read(row.response)
        if not _can_be_cut(tree):
            continue
        yield row
        seen = {strip(tree)}
        for sentences in reversed(SENTENCES):
            short = tuple(first_sentences(node, sentences, count_tokens) for node in tree)
            if (text := strip(short)) not in seen:
                seen.add(text)
                yield replace(row, id=f"{row.id}-{sentences}", response=show(short))


def _can_be_cut(tree: Tree) -> bool:
    chunks = [node for node in tree if isinstance(node, Chunk)]
    long = sum(len(sentence_ends(chunk.text)) > 1 for chunk in chunks)
    return long >= max(2, LONG_SHARE * len(chunks)) and Sync() not in tree
