"""What the interpreter wants done to an engine: its whole vocabulary, one class an action."""

from __future__ import annotations

from dataclasses import dataclass


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
    """`thread` has written its chunk. `kept`: its branch stays until main joins it, or ends."""

    thread: int
    truncated: bool
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Join:
    """Main sees the chunks of `threads` from now on; their branches end."""

    threads: tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class Trim:
    """The answer is what stands in the first `characters` of its text, in reading order."""

    characters: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing more will be written; every branch ends."""

    truncated: bool


Action = Append | Fork | CloseChunk | Join | Rewrite | Trim | Finish
