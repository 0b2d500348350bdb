"""From token ids to text: the text of a thread, the text of an answer, and where it ends.

A budget keeps the first tokens of an answer in reading order, a stop string the tokens up to the
one that completes it. So the end of an answer does not depend on which thread was faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pasta_decoding.answer.events import Closed, Delta, Event, Finished, Opened, ShownToken, Trimmed
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.vocabulary import FRAGMENT, Decode, Vocabulary
from pasta_decoding.lang.layout import MAIN, ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, valid_tokens, valid_topic

MAX_HELD_TOKENS = 8
"""ThreadText waits this long for a character, which has at most four bytes, hence four tokens."""


@dataclass(slots=True)
class ThreadText:
    """The growing text of one thread. A part of a character waits for the rest of it.

    strip_end: white space waits for the text after it and is dropped at the end, because a chunk
               does not end with white space.
    """

    decode: Decode
    strip_end: bool = False
    _ids: list[int] = field(default_factory=list)
    _waiting_space: str = ""

    def add(self, token: int) -> str:
        """Take a token and return the text that is certain now, perhaps none."""
        self._ids.append(token)
        text = self.decode(self._ids)
        if text.endswith(FRAGMENT) and len(self._ids) < MAX_HELD_TOKENS:
            return ""
        self._ids.clear()
        return self._visible(text)

    def end(self) -> str:
        """Return the text that waited. A part of a character is decoded as it is."""
        text = self.decode(self._ids) if self._ids else ""
        self._ids.clear()
        return self._visible(text)

    def _visible(self, text: str) -> str:
        if not self.strip_end:
            return text
        text = self._waiting_space + text
        visible = text.rstrip()
        self._waiting_space = text[len(visible) :]
        return visible


@dataclass(slots=True)
class AnswerText:
    """Turns live events into text in reading order, as early as that order and `stops` allow.

    The text ends before the stop string that is complete first; of those that end together, before
    the longest. Text that could be the beginning of a stop string is held back. So the result does
    not depend on how the text is cut into events.

    stopped:     has a stop string been found? Then no more text is shown.
    _waiting:    the thread and the events of each run of text, in reading order, from the first run
                 that may still grow.
    _ends_after: characters after which a `Trimmed` event ends the text.
    _held:       text in reading order that is not shown yet.
    _tokens:     tokens of the text that `take_tokens` has not returned.
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
        """Take the next event and return the text that can be shown now, perhaps none."""
        match event:
            case Opened(thread):
                self._waiting += [(thread, []), (MAIN, [])]
            case Delta(thread):
                self._last_run(thread).append(event)
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

    def _last_run(self, thread: int) -> list[Delta]:
        return next(run for writer, run in reversed(self._waiting) if writer == thread)

    def _in_turn(self) -> Iterator[Delta]:
        """Yield the events whose text is next in reading order."""
        while self._waiting:
            thread, run = self._waiting[0]
            yield from run
            run.clear()
            # Main's last run may still grow; its earlier runs and closed chunks cannot.
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
        shown_chars = len(self._held) - growing
        text = self._held[:shown_chars]
        self._held = self._held[shown_chars:]
        self._shown_chars += shown_chars
        return text

    def _growing_chars(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        longest_stop = max(map(len, self.stops), default=1)
        for size in range(min(len(self._held), longest_stop - 1), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self.stops):
                return size
        return 0


def tree_of(segments: Sequence[Segment], vocabulary: Vocabulary, *, cut_off: bool = False) -> Tree:
    """Return the tree of decoded segments. White space at a chunk's end is dropped.

    cut_off: drop a character of which the last segment has only a part.
    """
    nodes: list[Node] = []
    promise = PromiseRun((), 0)
    last = len(segments) - 1
    for index, segment in enumerate(segments):
        is_complete = not cut_off or index < last
        match segment:
            case MainRun(ids):
                text = stretch_text(ids, vocabulary.decode, is_complete=is_complete)
                if text:
                    nodes.append(Span(text))
            case PromiseRun():
                promise = segment
            case ChunkRun(ids):
                topic = valid_topic(vocabulary.decode(promise.ids[1:-1]))
                text = stretch_text(ids[1:], vocabulary.decode, is_complete=is_complete)
                nodes.append(Chunk(topic, valid_tokens(promise.promised), text.rstrip()))
            case SyncRun():
                nodes.append(Sync())
    return tuple(nodes)


def stretch_text(ids: Sequence[int], decode: Decode, *, is_complete: bool = True) -> str:
    """Return the text of one segment's ids, equal to the sum of its streamed pieces.

    is_complete: no id follows; else a part of a character at the end is left out.
    """
    thread = ThreadText(decode)
    pieces = [thread.add(token) for token in ids]
    if is_complete:
        pieces.append(thread.end())
    return "".join(pieces)


def fed_count(segments: Sequence[Segment]) -> int:
    """Return how many tokens of `segments` an engine is fed, tags included."""
    return sum(1 if isinstance(segment, SyncRun) else len(segment.ids) for segment in segments)


def joined_text(segments: Sequence[Segment]) -> list[int]:
    """Return the ids of main's text and of the chunks that a SYNC of `segments` joins."""
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
    """Return `segments` cut off after this many tokens.

    A promise is dropped unless ASYNC_OPEN and a first token of its chunk remain. A chunk in which
    the tokens end is not closed.
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
    """Yield numbers of tokens, in reading order, with the text that becomes certain with them."""
    for segment in segments:
        if not isinstance(segment, MainRun | ChunkRun):
            yield fed_count([segment]), ""
            continue
        is_chunk = isinstance(segment, ChunkRun)
        ids = segment.ids
        if is_chunk:
            yield 1, ""  # ASYNC_OPEN
            ids = ids[1:]
        thread = ThreadText(vocabulary.decode, strip_end=is_chunk)
        for token in ids:
            yield 1, thread.add(token)
        yield 0, thread.end()
