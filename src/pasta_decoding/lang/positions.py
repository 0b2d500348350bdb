"""Position schemes: which position ids the threads of one answer take.

A scheme is named in a checkpoint's `pasta.json`, because a model only works under the scheme that
it was trained with. The layout and the interpreter take every position from the scheme. To add a
scheme, add an entry to `SCHEMES`. In all schemes ASYNC_OPEN takes the position after PROMISE_CLOSE.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pasta_decoding.errors import PastaError


def behind_largest(main_next: int, joined: Sequence[range]) -> int:
    """Return the position after the largest one that SYNC sees."""
    return max([main_next, *(chunk.stop for chunk in joined)])


def behind_sum(main_next: int, joined: Sequence[range]) -> int:
    """Return the position that leaves room for all joined chunks one after the other."""
    return main_next + sum(map(len, joined))


@dataclass(frozen=True, slots=True)
class Scheme:
    """One position scheme.

    name:        its name in `pasta.json`.
    sync:        returns the position of SYNC, given main's next position and the positions of each
                 chunk that it joins.
    reserves:    does main leave out a position for each token that a promise counts?
    consecutive: is each position 1 + the largest that its thread sees? Some engines need that.
    """

    name: str
    sync: Callable[[int, Sequence[range]], int]
    reserves: bool = False
    consecutive: bool = False

    def main_next(self, close: int, promised: int) -> int:
        """Return main's next position, given that of PROMISE_CLOSE and the promised length."""
        return close + 1 + (promised if self.reserves else 0)


SHARED_MAX = Scheme("shared-max", behind_largest, consecutive=True)
"""Chunk and main thread both continue from the position after PROMISE_CLOSE."""
SHARED_SUM = Scheme("shared-sum", behind_sum)
"""As `shared-max`, but a SYNC and the text after it stand at their place in reading order: the
positions of an ordinary causal sequence, which the base model knows."""
RESERVE = Scheme("reserve", behind_largest, reserves=True)
"""As in the PASTA paper (arXiv 2502.11517), where promises count tens of tokens (Pred-10X). A chunk
longer than its reserve shares positions with the text of main after the promise."""

SCHEMES = {scheme.name: scheme for scheme in (SHARED_MAX, SHARED_SUM, RESERVE)}


def scheme_named(name: str) -> Scheme:
    """Return a scheme by its name. Raises PastaError, with the names that exist, for any other."""
    if name not in SCHEMES:
        raise PastaError(f"no position scheme {name!r}; known are {', '.join(SCHEMES)}")
    return SCHEMES[name]
