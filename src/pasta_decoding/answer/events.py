"""Events of an answer, for its reader, and actions, which the interpreter asks of an engine.

The text of an answer is a fold of its events: see `text.AnswerText`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability (natural) that the model gave a token, before temperature, cuts and bias.

    top: id and log probability of the likeliest tokens, the likeliest first, if requested.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A thread started. Its text stands at this point of the reading order.

    tokens: the promised length.
    """

    thread: int
    topic: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a thread, and the log probabilities of its tokens, if requested."""

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
    """Main sees the chunks of these threads from now on. As an action: end their branches."""

    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A limit or a stop string ends the text after this many characters, in reading order.

    Text beyond them, in earlier or later events, is not part of the answer.
    """

    characters: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete, or was cut off."""

    truncated: bool


Event = Opened | Delta | Closed | Synced | Trimmed | Finished


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the shown text. `start`: characters of text before the piece that holds it."""

    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of an answer since the last `Progress`.

    text:   new text in reading order, as far as it is certain; it ends before a stop string.
    tokens: the tokens of `text`, if log probabilities were requested.
    step:   forward steps so far, without the prefill.
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
    """Start `thread`: fork it off main, feed `close` to both and `opening` to the new branch.

    promised: the length that `close` carries, in tokens.
    """

    thread: int
    close: Append
    opening: Append
    topic: str
    promised: int


@dataclass(frozen=True, slots=True)
class CloseChunk:
    """`thread` ends its chunk. Unless `keep_branch`, its branch ends: main will not join it."""

    thread: int
    truncated: bool
    keep_branch: bool = True


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The `text` join: main sees the chunks of `threads` from now on, as text in reading order.

    The branch of `first`, the first of `threads`, holds the reading order up to its end. Main
    continues from that branch: feed `ids`, which end in SYNC, from `position` on. Main's old branch
    ends.
    """

    threads: tuple[int, ...]
    first: int
    ids: tuple[int, ...]
    position: int


Action = Append | Fork | CloseChunk | Synced | Rewrite | Trimmed | Finished
