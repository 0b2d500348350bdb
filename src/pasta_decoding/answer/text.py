"""From token ids to text: of a thread while it is written, of an answer, and where that ends.

A budget keeps the first tokens of an answer in reading order, a stop string those up to the one
that completes it. So what is kept does not depend on which thread was faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pasta_decoding.answer.events import Closed, Delta, Event, Finished, Opened, ShownToken, Trimmed
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.vocabulary import FRAGMENT, Decode, Vocabulary
from pasta_decoding.lang.layout import MAIN, ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, valid_tokens, valid_topic

# A character has at most four bytes, hence tokens; what is longer undecodable stays so.
MAX_HELD_TOKENS = 8


@dataclass(slots=True)
class ThreadText:
    """The growing text of one thread. A character cut by a token border waits for its rest.

    keep_edge: hold white space back until more text follows, and drop it at the end: a chunk
    does not end with white space.
    """

    decode: Decode
    keep_edge: bool = False
    _ids: list[int] = field(default_factory=list)
    _edge: str = ""

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self.decode(self._ids)
        if text.endswith(FRAGMENT) and len(self._ids) < MAX_HELD_TOKENS:
            return ""
        self._ids.clear()
        return self._past_edge(text)

    def end(self) -> str:
        text = self.decode(self._ids) if self._ids else ""
        self._ids.clear()
        return self._past_edge(text)

    def _past_edge(self, text: str) -> str:
        if not self.keep_edge:
            return text
        text = self._edge + text
        visible = text.rstrip()
        self._edge = text[len(visible) :]
        return visible


@dataclass(slots=True)
class AnswerText:
    """Turns live events into text in reading order, as early as that order and the stops allow.

    The text ends before the stop string that is complete first, and the longest of those that end
    together, however the text comes in pieces. What could still grow into one is held back.

    stopped: a stop string was found: nothing more is shown, and the answer need not be written on.
    """

    stops: Sequence[str] = ()
    stopped: bool = False
    _waiting: list[tuple[int, list[Delta]]] = field(default_factory=lambda: [(MAIN, [])])
    _closed: set[int] = field(default_factory=set)
    _ends_after: int | None = None
    _held: str = ""
    _shown_chars: int = 0
    _tokens: list[ShownToken] = field(default_factory=list)

    def feed(self, event: Event) -> str:
        match event:
            case Opened(thread):
                self._waiting += [(thread, []), (MAIN, [])]
            case Delta(thread):
                next(held for who, held in reversed(self._waiting) if who == thread).append(event)
            case Closed(thread):
                self._closed.add(thread)
            case Finished():
                self._closed |= {thread for thread, _ in self._waiting}
            case Trimmed(characters):
                self._ends_after = characters
        for delta in self._in_turn():
            self._add(delta)
        return self._show(isinstance(event, Finished))

    def take_tokens(self) -> tuple[ShownToken, ...]:
        """Return the tokens of which something has been shown since the last call."""
        tokens = [token for token in self._tokens if token.start < self._shown_chars]
        del self._tokens[: len(tokens)]
        return tuple(tokens)

    def _in_turn(self) -> Iterator[Delta]:
        while self._waiting:
            thread, held = self._waiting[0]
            yield from held
            held.clear()
            # Main's last stretch may still grow; its earlier ones and closed chunks cannot.
            if len(self._waiting) == 1 or (thread != MAIN and thread not in self._closed):
                break
            self._waiting.pop(0)

    def _add(self, delta: Delta) -> None:
        start = self._shown_chars + len(self._held)
        max_chars = None if self._ends_after is None else max(0, self._ends_after - start)
        if self.stopped or max_chars == 0:
            return
        self._tokens += [ShownToken(start, token) for token in delta.logprobs]
        self._held += delta.text[:max_chars]
        matches = [(self._held.find(stop), len(stop)) for stop in self.stops]
        complete = [(begin + chars, begin) for begin, chars in matches if begin >= 0]
        if complete:
            _, begin = min(complete)  # the first to end; of those the longest
            self.stopped = True
            self._held = self._held[:begin]

    def _show(self, ended: bool) -> str:
        growing = 0 if ended or self.stopped else self._growing_chars()
        shown = self._held[: len(self._held) - growing]
        self._held = self._held[len(shown) :]
        self._shown_chars += len(shown)
        return shown

    def _growing_chars(self) -> int:
        """Count the last characters that may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self.stops), default=1) - 1)
        ends = ((size, self._held[-size:]) for size in range(longest, 0, -1))
        growing = (size for size, end in ends if any(stop.startswith(end) for stop in self.stops))
        return next(growing, 0)


def tree_of(segments: Sequence[Segment], vocabulary: Vocabulary, *, cut_off: bool = False) -> Tree:
    """Return what decoded segments say. White space at a chunk's end is dropped.

    cut_off: a character that their end cuts in two is no part of it.
    """
    nodes: list[Node] = []
    promise = PromiseRun((), 0)
    for place, segment in enumerate(segments, start=1):
        whole = not cut_off or place < len(segments)
        match segment:
            case MainRun(ids):
                text = stretch_text(ids, vocabulary.decode, whole=whole)
                if text:
                    nodes.append(Span(text))
            case PromiseRun():
                promise = segment
            case ChunkRun(ids):
                topic = valid_topic(vocabulary.decode(promise.ids[1:-1]))
                text = stretch_text(ids[1:], vocabulary.decode, whole=whole).rstrip()
                nodes.append(Chunk(topic, valid_tokens(promise.promised), text))
            case SyncRun():
                nodes.append(Sync())
    return tuple(nodes)


def stretch_text(ids: Sequence[int], decode: Decode, *, whole: bool = True) -> str:
    """Return the text of one stretch, by the same pieces that were streamed.

    whole: its end is an end; else what is not certain there is left out.
    """
    thread = ThreadText(decode)
    pieces = [thread.add(token) for token in ids]
    return "".join(pieces) + (thread.end() if whole else "")


def fed_count(segments: Sequence[Segment]) -> int:
    """Count the tokens of some segments: all that are fed, tags included."""
    return sum(1 if isinstance(segment, SyncRun) else len(segment.ids) for segment in segments)


def joined_text(segments: Sequence[Segment]) -> list[int]:
    """Return the ids of main's text, and of the chunks that a SYNC of `segments` has joined."""
    ids: list[int] = []
    chunks: list[int] = []
    for segment in segments:
        match segment:
            case MainRun():
                ids += segment.ids
            case ChunkRun():
                chunks += segment.ids[1:]
            case SyncRun():
                ids += chunks
                chunks = []
    return ids


def first_tokens(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """Return what of `segments` the first `tokens` tokens hold.

    A promise stays if its chunk's opening and a first token do. A chunk that the last token belongs
    to is not closed: its end would stand behind it.
    """
    first_segments: list[Segment] = []
    remaining_tokens = tokens
    for segment in segments:
        min_tokens = len(segment.ids) + 2 if isinstance(segment, PromiseRun) else 1
        if remaining_tokens < min_tokens:
            break
        match segment:
            case MainRun(ids, forced):
                first_segments.append(MainRun(ids[:remaining_tokens], forced))
            case ChunkRun(ids, closed):
                closed = closed and remaining_tokens > len(ids)
                first_segments.append(ChunkRun(ids[:remaining_tokens], closed=closed))
            case _:
                first_segments.append(segment)
        remaining_tokens -= fed_count(first_segments[-1:])
    return first_segments


def within_limits(
    segments: Sequence[Segment], rules: Rules, vocabulary: Vocabulary
) -> tuple[list[Segment], bool]:
    """Return the segments that the limits keep, and whether a stop string ended them."""
    within_budget = first_tokens(segments, rules.max_tokens)
    if not rules.stop:
        return within_budget, False
    answer_text = AnswerText(rules.stop)
    read_tokens = 0
    for added_tokens, text in _pieces(within_budget, vocabulary):
        read_tokens += added_tokens
        answer_text.feed(Delta(MAIN, text))
        if answer_text.stopped:
            return first_tokens(within_budget, read_tokens), True
    return within_budget, False


def _pieces(segments: Sequence[Segment], vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
    """Yield the text in reading order as it becomes certain, and of how many more tokens."""
    for segment in segments:
        if not isinstance(segment, MainRun | ChunkRun):
            yield fed_count([segment]), ""
            continue
        opening = isinstance(segment, ChunkRun)
        yield int(opening), ""
        thread = ThreadText(vocabulary.decode, keep_edge=opening)
        for token in segment.ids[opening:]:
            yield 1, thread.add(token)
        yield 0, thread.end()
