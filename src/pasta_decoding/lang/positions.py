"""Position schemes: which position ids the threads of one answer take.

A scheme is named in a checkpoint's `pasta.json`, because a model only works under the scheme that
it was trained with. The layout and the interpreter both ask the scheme and nobody else. To add one,
add an entry to `SCHEMES`. ASYNC_OPEN takes the position behind PROMISE_CLOSE in all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pasta_decoding.errors import PastaError


def behind_largest(main_next: int, joined: Sequence[range]) -> int:
    """Return the position behind the largest that SYNC sees."""
    return max([main_next, *(chunk.stop for chunk in joined)])


def behind_sum(main_next: int, joined: Sequence[range]) -> int:
    """Return the position that leaves room for all joined chunks, one behind the other."""
    return main_next + sum(map(len, joined))


@dataclass(frozen=True, slots=True)
class Scheme:
    """One scheme.

    name:        what `pasta.json` calls it.
    sync:        where SYNC goes, given main's next position and those of the chunks that it joins.
    reserves:    does main leave out as many positions as its promise has tokens (its bucket)?
    consecutive: is each position 1 + the largest that its thread sees? Some engines need that.
    """

    name: str
    sync: Callable[[int, Sequence[range]], int]
    reserves: bool = False
    consecutive: bool = False

    def main_next(self, close: int, promised: int) -> int:
        """Return where the main thread goes on, given the position of PROMISE_CLOSE."""
        return close + 1 + (promised if self.reserves else 0)


SHARED_MAX = Scheme("shared-max", behind_largest, consecutive=True)
"""Chunk and main thread go on side by side."""
SHARED_SUM = Scheme("shared-sum", behind_sum)
"""What follows a SYNC that left no chunk open stands at its place in reading order: the position
that the same tokens have in an ordinary causal sequence, which the base model knows."""
RESERVE = Scheme("reserve", behind_largest, reserves=True)
"""As the PASTA paper (arXiv 2502.11517) places threads, whose promises count tens of tokens (its
Pred-10X). A chunk that outgrows its reserve shares positions with main's text behind it."""

SCHEMES = {scheme.name: scheme for scheme in (SHARED_MAX, SHARED_SUM, RESERVE)}


def scheme_named(name: str) -> Scheme:
    """Raises PastaError, with the known names, if it is none of them."""
    if name not in SCHEMES:
        raise PastaError(f"no position scheme {name!r}; known are {', '.join(SCHEMES)}")
    return SCHEMES[name]
