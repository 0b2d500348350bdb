"""The events of an answer while it is being written, and its text in reading order.

The text of an answer is a fold of its events: `Ordered` gives the pieces as a person reads them,
a chunk behind an unfinished one waiting its turn, and `StopFilter` ends it before a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pasta_decoding.lang.layout import MAIN


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model made of a token: natural logarithms, before anything that sampling does.

    top: the likeliest ids of all, where they were asked for, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A thread started; what it writes stands here in reading order."""

    thread: int
    topic: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a thread, and what the model made of its tokens, if that was asked for."""

    thread: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """A chunk is complete, or was cut off."""

    thread: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """Main has seen the chunks of these threads and goes on."""

    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A limit or a stop string ends the text after this many characters, in reading order.

    Events of text behind them, earlier and later ones, are no part of the answer.
    """

    characters: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete, or was cut off."""

    truncated: bool


Event = Opened | Delta | Closed | Synced | Trimmed | Finished


@dataclass(frozen=True, slots=True)
class Placed:
    """A token of the text that is shown. `start`: characters before it, or before its piece."""

    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened in an answer since the last one.

    text:   what can be shown by now, in reading order, before a stop string.
    tokens: those of the text, if log probabilities were asked for.
    step:   forward steps behind the answer's prefill by then.
    """

    events: tuple[Event, ...]
    text: str
    tokens: tuple[Placed, ...]
    step: int


class Ordered:
    """Turns live events into text in reading order, as early as that order allows."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Delta]]] = [(MAIN, [])]
        self._closed: set[int] = set()
        self._shown = 0
        self._ends_after: int | None = None

    def feed(self, event: Event) -> str:
        """Return the text that can be shown after `event`."""
        return "".join(delta.text for delta in self.deltas(event))

    def deltas(self, event: Event) -> list[Delta]:
        """Return what can be shown after `event`."""
        match event:
            case Opened(thread):
                self._waiting += [(thread, []), (MAIN, [])]
            case Delta(thread):
                self._place(thread).append(event)
            case Closed(thread):
                self._closed.add(thread)
            case Finished():
                self._closed |= {thread for thread, _ in self._waiting}
            case Trimmed(characters):
                self._ends_after = characters
            case Synced():
                pass
        return self._within(self._release())

    def _place(self, thread: int) -> list[Delta]:
        return next(held for owner, held in reversed(self._waiting) if owner == thread)

    def _within(self, released: list[Delta]) -> list[Delta]:
        if self._ends_after is None:
            self._shown += sum(len(delta.text) for delta in released)
            return released
        kept = []
        for delta in released:
            text = delta.text[: max(0, self._ends_after - self._shown)]
            self._shown += len(text)
            kept += [replace(delta, text=text)] if text else []
        return kept

    def _release(self) -> list[Delta]:
        shown: list[Delta] = []
        while self._waiting:
            thread, held = self._waiting[0]
            shown += held
            held.clear()
            # Main's last stretch may still grow; its earlier ones and closed chunks cannot.
            if len(self._waiting) == 1 or (thread != MAIN and thread not in self._closed):
                break
            self._waiting.pop(0)
        return shown


def ordered(events: Iterable[Event]) -> Iterator[str]:
    """Yield the text of an answer in reading order, in pieces as they become certain."""
    fold = Ordered()
    for event in events:
        if text := fold.feed(event):
            yield text


class StopFilter:
    """Gives the text that can be shown, up to the first stop string.

    The first is the one that is complete first, and the longest of those that end together, however
    the text comes in pieces. Text that could still grow into a stop string is held back. `stopped`
    says that one was found: nothing more will be shown, and the answer need not be written on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self._stops = stops
        self._held = ""
        self._shown_chars = 0
        self._tokens: list[Placed] = []

    def add(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """Return the text that can be shown after more of it, in reading order."""
        if self.stopped:
            return ""
        start = self._shown_chars + len(self._held)
        self._tokens += [Placed(start, token) for token in logprobs]
        self._held += text
        places = [(self._held.find(stop), len(stop)) for stop in self._stops]
        found = [(place + chars, place) for place, chars in places if place >= 0]
        self.stopped = bool(found)
        _, shown = min(found, default=(0, len(self._held) - self._growing_chars()))
        return self._release(shown)

    def finish(self) -> str:
        """Return what was held back, at the end of the answer."""
        return "" if self.stopped else self._release(len(self._held))

    def take_tokens(self) -> tuple[Placed, ...]:
        """Return the tokens of which something has been shown since the last call."""
        shown = [one for one in self._tokens if one.start < self._shown_chars]
        del self._tokens[: len(shown)]
        return tuple(shown)

    def _growing_chars(self) -> int:
        """Count the last characters that may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = ((size, self._held[-size:]) for size in range(longest, 0, -1))
        growing = (size for size, end in ends if any(one.startswith(end) for one in self._stops))
        return next(growing, 0)

    def _release(self, chars: int) -> str:
        shown, self._held = self._held[:chars], self._held[chars:]
        self._shown_chars += chars
        return shown
