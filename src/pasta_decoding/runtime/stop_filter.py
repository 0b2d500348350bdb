"""What a reader sees of an answer: the text of its threads in reading order, cut at a stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.events import Delta, Event, Ordered, TokenLogprobs


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
