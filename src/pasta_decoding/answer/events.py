"""What happens in an answer: events for a reader, and what the interpreter wants of an engine.

One class each. The text of an answer is a fold of its events; see `text.AnswerText`.
"""

from dataclasses import dataclass


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
    """Main sees the chunks of these threads and goes on. As an action: their branches end."""

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
class ShownToken:
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
    tokens: tuple[ShownToken, ...]
    step: int


# Actions


@dataclass(frozen=True, slots=True)
class Append:
    """Feed `token` to the branch of `thread` at `position`."""

    thread: int
    token: int
    position: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Start `thread`: fork it off main, feed `close` to both and `opening` to the new branch."""

    thread: int
    close: Append
    opening: Append
    topic: str
    promised: int


@dataclass(frozen=True, slots=True)
class CloseChunk:
    """`thread` has written its chunk. `keep_branch`: until main joins it, or ends."""

    thread: int
    truncated: bool
    keep_branch: bool = True


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The `text` join: main sees the chunks of `threads` from now on, as text in reading order.

    It goes on with what `first`, the first of them, sees at its end: up to there, that is the
    reading order. `ids`, SYNC the last of them, follow from `position`. Main's own branch ends.
    """

    threads: tuple[int, ...]
    first: int
    ids: tuple[int, ...]
    position: int


Action = Append | Fork | CloseChunk | Synced | Rewrite | Trimmed | Finished
