"""What an answer says: main text, chunks and syncs, in reading order.

`read` never fails. This module is the one place in the code that gives malformed input its
meaning; the table in docs/language.md has a row for each `report` and each `valid_` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pasta_decoding.lang import tags
from pasta_decoding.lang.parser import parse

MAX_TOPIC_WORDS = 3
MAX_TOPIC_CHARS = 200
MAX_TOKENS = 100_000
"""These two keep every canonical promise shorter than `tags.MAX_PROMISE_CHARS`."""


@dataclass(frozen=True, slots=True)
class Span:
    """Text of the main thread."""

    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A promise and the text that keeps it; `topic` is None where none was given."""

    topic: str | None
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Sync:
    """The main thread waits here for the chunks since the last sync."""


Node = Span | Chunk | Sync
Tree = tuple[Node, ...]
Report = Callable[[int, str], None]
"""Called with a source position and the rule of lang/check.py that is broken there."""


def read(text: str) -> Tree:
    """Return the meaning of a response in the text form, whatever it holds."""
    return read_events(parse(text))


def show(tree: Tree) -> str:
    """Return the text form of a normal tree; `read` is its exact inverse.

    Normal: no empty or adjacent spans, syncs only behind a chunk that none joined yet, topics
    and token counts as `valid_topic` and `valid_tokens` return them.
    """
    return "".join(
        _show_node(node, before_tag=place < len(tree)) for place, node in enumerate(tree, start=1)
    )


def strip(tree: Tree) -> str:
    """Return the plain response that a reader is owed: every text, no tag."""
    return "".join(node.text for node in tree if not isinstance(node, Sync))


def has_chunk(tree: Tree) -> bool:
    """Does another thread write any part of it?"""
    return any(isinstance(node, Chunk) for node in tree)


def in_text_form(text: str) -> bool:
    """Is this a text form, not plain text? A chunk or an escaped tag gives it away."""
    return has_chunk(read(text)) or tags.has_escape(text)


def without_topics(tree: Tree) -> Tree:
    """Return the same with no topic in any promise."""
    return tuple(replace(node, topic=None) if isinstance(node, Chunk) else node for node in tree)


def valid_topic(topic: str | None) -> str | None:
    """Return the nearest valid topic: single spaces, three words, nothing that needs escapes."""
    words = "".join(c for c in topic or "" if c not in '"<>\\').split()[:MAX_TOPIC_WORDS]
    return " ".join(words)[:MAX_TOPIC_CHARS].rstrip() or None


def valid_tokens(tokens: int | None) -> int:
    """Return `tokens` as the next multiple of 10, or the default if there are none to speak of."""
    if tokens is None or tokens <= 0:
        return tags.DEFAULT_TOKENS
    return min(-(-tokens // 10) * 10, MAX_TOKENS)


def _show_node(node: Node, *, before_tag: bool) -> str:
    match node:
        case Span(text):
            return tags.escape(text, before_tag=before_tag)
        case Chunk(topic, tokens, text):
            assert topic == valid_topic(topic), f"not a topic: {topic!r}"
            assert tokens == valid_tokens(tokens), f"not a promised length: {tokens}"
            body = tags.escape(text, before_tag=True)
            return f"{tags.promise_tag(topic, tokens)}<async>{body}</async>"
        case Sync():
            return "<sync/>"


def read_events(events: Iterable[tags.Event], report: Report = lambda _pos, _rule: None) -> Tree:
    """Return the meaning of the events of one whole response; `report` hears what is malformed."""
    reader = _TreeReader(report)
    for event in events:
        reader.on_event(event)
    return reader.finish()


class _TreeReader:
    """The meaning of one response, event by event."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._nodes: list[Node] = []
        self._span: list[str] = []
        self._promise: tags.Promise | None = None
        self._chunk: list[str] | None = None
        self._chunk_pos = 0
        self._unjoined = False

    def on_event(self, event: tags.Event) -> None:
        if self._chunk is None:
            self._in_main(event)
        else:
            self._in_chunk(event, self._chunk)

    def finish(self) -> Tree:
        """Consume the end of the answer: an open chunk is closed, a bare promise dropped."""
        if self._chunk is not None:
            self._report(self._chunk_pos, "unclosed-async")
            self._close(self._chunk)
        self._drop_promise()
        self._end_span()
        return tuple(self._nodes)

    def _in_main(self, event: tags.Event) -> None:
        match event:
            case tags.Text(_, text):
                self._span.append(text)
                if not text.isspace():
                    self._drop_promise()
            case tags.Promise():
                self._drop_promise()
                self._promise = event
            case tags.AsyncOpen():
                self._open(event)
            case tags.AsyncClose():
                self._drop_promise()
                self._report(event.pos, "stray-close")
            case tags.Sync():
                self._drop_promise()
                self._sync(event)

    def _in_chunk(self, event: tags.Event, chunk: list[str]) -> None:
        match event:
            case tags.Text(pos, text):
                if not chunk and text[:1].isspace():
                    self._report(pos, "space-in-chunk")
                chunk.append(text)
            case tags.AsyncClose():
                if chunk and chunk[-1][-1:].isspace():
                    self._report(event.pos, "space-in-chunk")
                self._close(chunk)
            case _:
                self._report(event.pos, "tag-in-chunk")

    def _open(self, event: tags.AsyncOpen) -> None:
        promise = self._promise
        if promise is None:
            self._report(event.pos, "async-without-promise")
            return
        if promise.pos + len(promise.source) != event.pos:
            self._report(event.pos, "space-before-async")
        self._chunk = []
        self._chunk_pos = event.pos

    def _close(self, chunk: list[str]) -> None:
        promise = self._promise
        assert promise is not None, "a chunk was opened without its promise"
        if not chunk:
            self._report(self._chunk_pos, "empty-chunk")
        self._end_span()
        node = Chunk(valid_topic(promise.topic), valid_tokens(promise.tokens), "".join(chunk))
        self._nodes.append(node)
        self._promise = self._chunk = None
        self._unjoined = True

    def _sync(self, event: tags.Sync) -> None:
        if not self._unjoined:
            self._report(event.pos, "idle-sync")
            return
        self._end_span()
        self._nodes.append(Sync())
        self._unjoined = False

    def _drop_promise(self) -> None:
        if self._promise is not None:
            self._report(self._promise.pos, "promise-without-async")
        self._promise = None

    def _end_span(self) -> None:
        if self._span:
            self._nodes.append(Span("".join(self._span)))
        self._span = []
