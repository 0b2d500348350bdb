"""An answer as a tree: main text, chunks and syncs, in reading order.

`read` never fails. Only this module gives malformed input its meaning; the table in
docs/language.md has a row for each `report` and each `valid_` here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pasta_decoding.lang import tags

NOT_IN_TOPIC = frozenset('"<>\\')
MAX_TOPIC_WORDS = 3
MAX_TOPIC_CHARS = 200
MAX_TOKENS = 100_000
"""MAX_TOPIC_CHARS and MAX_TOKENS keep canonical promises within `tags.MAX_PROMISE_CHARS`."""


@dataclass(frozen=True, slots=True)
class Span:
    """Text of the main thread."""

    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A promise and the text that keeps it; `topic` is None for a promise without one."""

    topic: str | None
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Sync:
    """The main thread waits here for the chunks since the last sync."""


Node = Span | Chunk | Sync
Tree = tuple[Node, ...]
RuleReporter = Callable[[int, str], None]
"""A function of a source position and the rule of lang/check.py that is broken there."""


def read(text: str, report: RuleReporter = lambda _pos, _rule: None) -> Tree:
    """Return the nodes of a response in the text form. Any text is accepted."""
    reader = _Reader(report)
    events = iter(tags.parse(text))
    for event in events:
        reader.read(event, events)
    reader.drop_promise()
    return tuple(reader.nodes)


def text_form(tree: Tree) -> str:
    """Return the text form of a normal tree; `read` is its exact inverse.

    In a normal tree no span is empty or next to another, every sync joins a chunk, and topics and
    token counts are as `valid_topic` and `valid_tokens` return them.
    """
    last = len(tree) - 1
    return "".join(_node_text(node, before_tag=index < last) for index, node in enumerate(tree))


def strip(tree: Tree) -> str:
    """Return the plain response, for a reader: all text, no tags."""
    return "".join(node.text for node in tree if not isinstance(node, Sync))


def has_chunk(tree: Tree) -> bool:
    """Does a thread other than main write a part of the answer?"""
    return any(isinstance(node, Chunk) for node in tree)


def in_text_form(text: str) -> bool:
    """Is `text` in the text form? It is if it has a chunk or an escaped tag."""
    return has_chunk(read(text)) or tags.has_escape(text)


def without_topics(tree: Tree) -> Tree:
    """Return the tree with the topic of every chunk removed."""
    return tuple(replace(node, topic=None) if isinstance(node, Chunk) else node for node in tree)


def valid_topic(topic: str | None) -> str | None:
    """Return the nearest valid topic: three words, single spaces, nothing that needs escapes."""
    allowed = "".join(char for char in topic or "" if char not in NOT_IN_TOPIC)
    words = allowed.split()[:MAX_TOPIC_WORDS]
    return " ".join(words)[:MAX_TOPIC_CHARS].rstrip() or None


def valid_tokens(tokens: int | None) -> int:
    """Return `tokens` rounded up to a multiple of 10, or the default if it is None or below 1."""
    if tokens is None or tokens <= 0:
        return tags.DEFAULT_TOKENS
    return min(-(-tokens // 10) * 10, MAX_TOKENS)


def _node_text(node: Node, *, before_tag: bool) -> str:
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


@dataclass
class _Reader:
    """Reads the events of one answer into `nodes`.

    promise:  the promise that waits for its `<async>`, if any.
    unjoined: does a chunk wait for a sync?
    """

    report: RuleReporter
    nodes: list[Node] = field(default_factory=list)
    promise: tags.Promise | None = None
    unjoined: bool = False

    def read(self, event: tags.TagEvent, following: Iterator[tags.TagEvent]) -> None:
        """Read an event of the main thread; if it opens a chunk, read that from `following`."""
        match event:
            case tags.Text(_, text):
                if not text.isspace():
                    self.drop_promise()
                if self.nodes and isinstance(span := self.nodes[-1], Span):
                    self.nodes[-1] = Span(span.text + text)
                else:
                    self.nodes.append(Span(text))
            case tags.AsyncOpen(pos) if self.promise is not None:
                self._add_chunk(self.promise, pos, following)
            case _:
                self.drop_promise()
                self._read_tag(event)

    def drop_promise(self) -> None:
        if self.promise is not None:
            self.report(self.promise.pos, "promise-without-async")
        self.promise = None

    def _add_chunk(
        self, promise: tags.Promise, pos: int, following: Iterator[tags.TagEvent]
    ) -> None:
        if promise.pos + len(promise.source) != pos:
            self.report(pos, "space-before-async")
        text = _chunk_text(pos, following, self.report)
        self.nodes.append(Chunk(valid_topic(promise.topic), valid_tokens(promise.tokens), text))
        self.promise = None
        self.unjoined = True

    def _read_tag(self, event: tags.TagEvent) -> None:
        match event:
            case tags.Promise():
                self.promise = event
            case tags.AsyncOpen(pos):
                self.report(pos, "async-without-promise")
            case tags.AsyncClose(pos):
                self.report(pos, "stray-close")
            case tags.Sync() if self.unjoined:
                self.nodes.append(Sync())
                self.unjoined = False
            case tags.Sync(pos):
                self.report(pos, "idle-sync")


def _chunk_text(open_pos: int, following: Iterator[tags.TagEvent], report: RuleReporter) -> str:
    """Return the text of a chunk, whose `<async>` is at `open_pos`, from the events after it."""
    texts: list[str] = []
    for event in following:
        match event:
            case tags.Text(pos, text):
                if not texts and text[0].isspace():
                    report(pos, "space-in-chunk")
                texts.append(text)
            case tags.AsyncClose(pos):
                if texts and texts[-1][-1].isspace():
                    report(pos, "space-in-chunk")
                break
            case _:
                report(event.pos, "tag-in-chunk")
    else:
        report(open_pos, "unclosed-async")
    if not texts:
        report(open_pos, "empty-chunk")
    return "".join(texts)
