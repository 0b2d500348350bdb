"""Position schemes: which position ids the threads of one answer take.

A scheme is named in a checkpoint's `pasta.json`, because a model only works under the scheme that
it was trained with. The layout and the interpreter both ask the scheme and nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pasta_decoding.errors import PastaError


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions of one chunk, and what was promised for it.

    first:    position of its ASYNC_OPEN.
    last:     position of its last token so far.
    promised: tokens that its promise announced (the length bucket).
    """

    first: int
    last: int
    promised: int


class Scheme(Protocol):
    """Three questions, each answered with a position id."""

    @property
    def name(self) -> str:
        """What `pasta.json` calls this scheme."""
        ...

    @property
    def consecutive(self) -> bool:
        """Whether each position is 1 + the largest that its thread sees. Some engines need that."""
        ...

    def chunk_start(self, close: int, promised: int) -> int:
        """Where ASYNC_OPEN goes, given the position of PROMISE_CLOSE."""
        ...

    def main_next(self, close: int, promised: int) -> int:
        """Where the main thread goes on after PROMISE_CLOSE."""
        ...

    def sync(self, main_next: int, joined: Sequence[Extent]) -> int:
        """Where SYNC goes, given the main thread's next position and the chunks it joins."""
        ...


@dataclass(frozen=True, slots=True)
class SharedMax:
    """Chunk and main thread go on side by side; SYNC follows the largest position that it sees."""

    name: str = "shared-max"
    consecutive: bool = True

    def chunk_start(self, close: int, promised: int) -> int:  # noqa: ARG002 (the protocol's)
        """See `Scheme`."""
        return close + 1

    def main_next(self, close: int, promised: int) -> int:  # noqa: ARG002 (the protocol's)
        """See `Scheme`."""
        return close + 1

    def sync(self, main_next: int, joined: Sequence[Extent]) -> int:
        """See `Scheme`."""
        return max([main_next, *(chunk.last + 1 for chunk in joined)])


@dataclass(frozen=True, slots=True)
class SharedSum:
    """As `SharedMax`, but SYNC leaves room for all chunks that it joins, one behind the other.

    Joined chunks take as many positions as they have tokens, ASYNC_OPEN counted, so what follows
    a SYNC that left no chunk open stands at its place in reading order: the position that the
    same tokens have in an ordinary causal sequence, which is what the base model knows.
    """

    name: str = "shared-sum"
    consecutive: bool = False

    def chunk_start(self, close: int, promised: int) -> int:  # noqa: ARG002 (the protocol's)
        """See `Scheme`."""
        return close + 1

    def main_next(self, close: int, promised: int) -> int:  # noqa: ARG002 (the protocol's)
        """See `Scheme`."""
        return close + 1

    def sync(self, main_next: int, joined: Sequence[Extent]) -> int:
        """See `Scheme`."""
        return main_next + sum(chunk.last + 1 - chunk.first for chunk in joined)


@dataclass(frozen=True, slots=True)
class Reserve:
    """The promised length is reserved: main goes on behind it, and the chunk fills it.

    This is how the PASTA paper (arXiv 2502.11517) places threads, whose promises count tens of
    tokens: ten times the number is reserved (its Pred-10X). Here that is the length bucket, in
    tokens; ASYNC_OPEN takes the first of the reserved positions. A chunk that outgrows them shares
    positions with main's text behind it, and SYNC goes behind the largest position that it sees.
    """

    name: str = "reserve"
    consecutive: bool = False

    def chunk_start(self, close: int, promised: int) -> int:  # noqa: ARG002 (the protocol's)
        """See `Scheme`."""
        return close + 1

    def main_next(self, close: int, promised: int) -> int:
        """See `Scheme`."""
        return close + 1 + promised

    def sync(self, main_next: int, joined: Sequence[Extent]) -> int:
        """See `Scheme`."""
        return max([main_next, *(chunk.last + 1 for chunk in joined)])


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (SharedMax(), SharedSum(), Reserve())
}
_FORMER_NAMES = {"reserve-10x": "reserve"}


def scheme_named(name: str) -> Scheme:
    """Return the scheme called `name`. Raises PastaError with the known names otherwise."""
    name = _FORMER_NAMES.get(name, name)
    if name in SCHEMES:
        return SCHEMES[name]
    known = ", ".join(SCHEMES)
    raise PastaError(f"unknown position scheme {name!r}", hint=f"This version knows: {known}.")
