"""How the threads of an answer ran, drawn from its annotated text.

Records keep no trace, so a piece of text is taken to have tokens in proportion to its characters,
and a promise costs the main thread what lang/measures.py says. Steps are at unlimited width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pasta_decoding.evaluation.records import Record
from pasta_decoding.lang.measures import promise_tokens
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, read


@dataclass(frozen=True, slots=True)
class Bar:
    """Steps in which a thread wrote, from `start` to `end`. Thread 0 is main; k wrote chunk k."""

    thread: int
    start: float
    end: float
    label: str = ""


def timeline(record: Record) -> list[Bar]:
    """Return when each thread wrote, in steps."""
    tree = read(record.annotated)
    characters = sum(len(node.text) for node in tree if not isinstance(node, Sync))
    return _bars(tree, record.plain_tokens / max(1, characters))


def _bars(tree: Tree, tokens_per_character: float) -> list[Bar]:
    now, begun = 0.0, 0.0
    main: list[Bar] = []
    chunks: list[Bar] = []
    for node in tree:
        match node:
            case Span(text):
                now += len(text) * tokens_per_character
            case Chunk(topic, _, text):
                now += promise_tokens(topic)
                end = now + len(text) * tokens_per_character
                chunks.append(Bar(len(chunks) + 1, now, end, topic or ""))
            case Sync():
                main.append(Bar(0, begun, now))
                begun = max(now, *(bar.end for bar in chunks))
                now = begun + 1
    return [*main, Bar(0, begun, now), *chunks]


def telling_sample(records: Iterable[Record], *, chunks: int = 3) -> Record | None:
    """Return the answer whose own speedup is the median of those with so many chunks."""
    many = [one for one in records if one.error is None and one.chunks >= chunks]
    ranked = sorted(many, key=lambda one: (one.plain_tokens / max(1, one.critical_path), one.id))
    return ranked[len(ranked) // 2] if ranked else None
