"""Is a sync of use? Text behind it must name or use a part that it joined.

- behind a sync: all the text that follows it, chunks included, since they see what it joined.
- joined: every chunk before it.
- names a part: holds a content word of its topic.
- uses a part: holds two content words or numbers of joined texts that stand neither in the prompt
  nor in the main text before the sync, so that nobody could know them without having waited.
- content word: of four letters or more, in topics three, and no stop word (data/annotate/words.py);
  a plural is the same word.

On the 260 rows of data/annotated_written with a sync this holds for 259; of a closing that says
nothing ("all of these have their place") in their place for 4, of another row's text for 55.
"""

from __future__ import annotations

import re

from pasta_decoding.data.annotate.words import STOP_WORDS
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, strip

MIN_USED = 2
MIN_CHARS = 4
MIN_TOPIC_CHARS = 3
_WORD_OR_NUMBER = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+")


def text_behind_sync(tree: Tree) -> str:
    """Return what stands behind the first sync; empty if there is none."""
    return strip(tree[_first_sync(tree) :])


def uses_parts(tree: Tree, prompt: str = "") -> bool:
    """Does text behind a sync name or use a part that it joined?"""
    places = [place for place, node in enumerate(tree) if isinstance(node, Sync)]
    return any(_uses(tree[:place], tree[place:], prompt) for place in places)


def content(text: str, min_chars: int = MIN_CHARS) -> set[str]:
    """Return the content words and numbers of a text, in small letters and without plural's s."""
    return {
        one.rstrip("s")
        for one in _WORD_OR_NUMBER.findall(text.casefold())
        if one[0].isdecimal() or (len(one) >= min_chars and one not in STOP_WORDS)
    }


def _uses(before: Tree, behind: Tree, prompt: str) -> bool:
    chunks = [node for node in before if isinstance(node, Chunk)]
    topics = content(" ".join(node.topic or "" for node in chunks), MIN_TOPIC_CHARS)
    parts = content(" ".join(node.text for node in chunks))
    main = content(" ".join(node.text for node in before if isinstance(node, Span)))
    found = content(strip(behind), MIN_TOPIC_CHARS)
    used = found & (parts - main - content(prompt))
    return not found.isdisjoint(topics) or len(used) >= MIN_USED


def _first_sync(tree: Tree) -> int:
    return next((place for place, node in enumerate(tree) if isinstance(node, Sync)), len(tree))
