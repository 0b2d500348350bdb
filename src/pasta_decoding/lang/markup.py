"""Markup that opens a chunk belongs to the main thread, as white space and list markers do.

Siblings do not see each other, but the main thread sees the markers it wrote before. So items agree
on their style if the main thread writes `1. **` and the chunk goes on with the words.
"""

import re
from dataclasses import replace

from pasta_decoding.lang.tree import Chunk, Node, Span, Tree

# Emphasis closes in its line; underscores around a lone word are an identifier such as __init__.
_OPENING = re.compile(
    r"(?:[-+*\u2022\u2013]\s+"
    r"|\d{1,2}[.)]\s+"
    r"|#{1,6}\s+"
    r"|\*{1,3}(?=[^\s*][^\n]*\*)"
    r"|_{1,2}(?=[^\s_]+ [^\n]*_)"
    r")+"
)


def opening_markup(text: str) -> str:
    """Return the markup in front of the words of `text`: "1. **" of "1. **Tea**: hot"."""
    opening = _OPENING.match(text)
    if opening is None or opening.end() == len(text):
        return ""
    return opening[0]


def lift_markup(tree: Tree) -> Tree:
    """Move the markup that opens a chunk to the main thread in front of it.

    The text stays the same, and so do the promised lengths. A normal tree stays normal.
    """
    nodes: list[Node] = []
    for node in tree:
        if not isinstance(node, Chunk) or not (markup := opening_markup(node.text)):
            nodes.append(node)
            continue
        if nodes and isinstance(span := nodes[-1], Span):
            nodes[-1] = Span(span.text + markup)
        else:
            nodes.append(Span(markup))
        nodes.append(replace(node, text=node.text.removeprefix(markup)))
    return tuple(nodes)
