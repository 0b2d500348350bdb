"""Where an answer ends that something cuts off: a stop string, or its budget of tokens.

A budget keeps the first tokens of an answer in reading order, a stop string those up to the one
that completes it. So what is kept does not depend on which thread was faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pasta_decoding.lang.layout import MAIN, ChunkRun, PromiseRun, Run, Segment, SyncRun
from pasta_decoding.runtime.events import Delta, Event, Ordered, TokenLogprobs
from pasta_decoding.runtime.text import ThreadText
from pasta_decoding.runtime.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Placed:
    """A token of the text that is shown. `start`: characters before it, or before its piece."""

    start: int
    logprobs: TokenLogprobs


class StopFilter:
    """Turns live events into the text that can be shown, up to the first stop string.

    The first is the one that is complete first, and the longest of those that end together, however
    the text comes in pieces. Text that could still grow into a stop string is held back. `stopped`
    says that one was found: nothing more will be shown, and the answer need not be written on.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._ordered = Ordered()
        self._stops = tuple(stops)
        self._held = ""
        self._shown_chars = 0
        self._tokens: list[Placed] = []

    def feed(self, events: Iterable[Event]) -> str:
        """Return the text that can be shown after `events`."""
        coming = "".join(self._take(delta) for one in events for delta in self._ordered.deltas(one))
        return self._advance(coming)

    def add(self, text: str) -> str:
        """Return the text that can be shown after more of it, in reading order already."""
        return self._advance(self._take(Delta(MAIN, text)))

    def _advance(self, coming: str) -> str:
        if self.stopped or not coming:
            return ""
        places = [(self._held.find(stop), len(stop)) for stop in self._stops]
        found = [(place + chars, place) for place, chars in places if place >= 0]
        self.stopped = bool(found)
        _, shown = min(found, default=(0, len(self._held) - self._growing_chars()))
        return self._release(shown)

    def take_tokens(self) -> tuple[Placed, ...]:
        """Return the tokens of which something has been shown since the last call."""
        shown = [one for one in self._tokens if one.start < self._shown_chars]
        del self._tokens[: len(shown)]
        return tuple(shown)

    def _take(self, delta: Delta) -> str:
        start = self._shown_chars + len(self._held)
        self._tokens += [Placed(start, token) for token in delta.logprobs]
        self._held += delta.text
        return delta.text

    def finish(self) -> str:
        """Return what was held back, at the end of the answer."""
        return "" if self.stopped else self._release(len(self._held))

    def _growing_chars(self) -> int:
        """Count the last characters that may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = (size for size in range(longest, 0, -1) if self._may_grow(self._held[-size:]))
        return next(ends, 0)

    def _may_grow(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)

    def _release(self, chars: int) -> str:
        shown, self._held = self._held[:chars], self._held[chars:]
        self._shown_chars += chars
        return shown


def tokens_of(segments: Sequence[Segment]) -> int:
    """Count the tokens of some segments: all that are fed, tags included."""
    return sum(1 if isinstance(segment, SyncRun) else len(segment.ids) for segment in segments)


def first_tokens(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """Return what of `segments` the first `tokens` tokens hold.

    A promise stays if its chunk's opening and a first token do. A chunk that the last token belongs
    to is not closed: its end would stand behind it.
    """
    kept: list[Segment] = []
    left = tokens
    for segment in segments:
        if left < _least_tokens(segment):
            break
        kept.append(_beginning(segment, left))
        left -= tokens_of(kept[-1:])
    return kept


def within_limits(
    segments: Sequence[Segment], tokens: int, stops: Sequence[str], vocabulary: Vocabulary
) -> tuple[list[Segment], bool]:
    """Return what a budget of `tokens` and the stop strings keep, and whether one of these did."""
    kept = first_tokens(segments, tokens)
    stop = _tokens_to_stop(kept, stops, vocabulary)
    return (kept, False) if stop is None else (first_tokens(kept, stop), True)


def _tokens_to_stop(
    segments: Sequence[Segment], stops: Sequence[str], vocabulary: Vocabulary
) -> int | None:
    """Return how many tokens it takes until a stop string is complete; None if none ever is."""
    if not stops:
        return None
    found, tokens = StopFilter(stops), 0
    for added, text in _pieces(segments, vocabulary):
        tokens += added
        found.add(text)
        if found.stopped:
            return tokens
    return None


def _least_tokens(segment: Segment) -> int:
    return len(segment.ids) + 2 if isinstance(segment, PromiseRun) else 1


def _beginning(segment: Segment, tokens: int) -> Segment:
    match segment:
        case Run(ids, forced):
            return Run(ids[:tokens], forced)
        case ChunkRun(ids, closed):
            return ChunkRun(ids[:tokens], closed=closed and tokens > len(ids))
        case _:
            return segment


def _pieces(segments: Sequence[Segment], vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
    """Yield the text in reading order as it becomes certain, and of how many more tokens."""
    for segment in segments:
        match segment:
            case Run(ids):
                yield from _stretch(ids, ThreadText(vocabulary.decode))
            case ChunkRun(ids):
                yield 1, ""
                yield from _stretch(ids[1:], ThreadText(vocabulary.decode, keep_edge=True))
            case _:
                yield tokens_of([segment]), ""


def _stretch(ids: Sequence[int], thread: ThreadText) -> Iterator[tuple[int, str]]:
    for token in ids:
        yield 1, thread.add(token)
    yield 0, thread.end()
