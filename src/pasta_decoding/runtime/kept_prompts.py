"""Beginnings of ended answers that stay in the cache, for prompts that begin alike.

A conversation's next turn begins with the last one's prompt, many begin with one system prompt.
What is kept takes only what is free: it goes, least recently used first, when a request needs room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pasta_decoding.engines.base import Branch, Engine
from pasta_decoding.runtime.admission import Demand

MOST_KEPT = 32
"""Beginnings at a time: each takes a branch of the engine."""
KEPT_SHARE = 2
"""They take at most this part of the engine's cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Tokens that a request was fed first, and a branch that sees them."""

    ids: tuple[int, ...]
    branch: Branch


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return with how many tokens both begin."""
    longest = min(len(one), len(other))
    if one[:longest] == other[:longest]:
        return longest
    return next(n for n in range(longest) if one[n] != other[n])


class KeptPrompts:
    """The beginnings, least recently used first. Each has a shrunk request of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: list[Beginning] = []

    def __iter__(self) -> Iterator[Beginning]:
        """Go through what is kept."""
        return iter(list(self._kept))

    @property
    def cells(self) -> int:
        """Tokens that are kept."""
        return sum(len(one.ids) for one in self._kept)

    def keep(self, beginning: Beginning) -> None:
        """Take over the last branch of a request, to be kept or closed.

        What begins it is not kept twice.
        """
        tokens = len(beginning.ids)
        for one in self:
            shared = alike(one.ids, beginning.ids)
            if shared == tokens:
                self.use(one)
                self._engine.close(beginning.branch)
                return
            if shared == len(one.ids):
                self._drop(one)
        self._engine.shrink(beginning.branch, tokens)
        self._kept.append(beginning)
        most = self._engine.max_slots
        while len(self._kept) > MOST_KEPT or (most is not None and self.cells > most // KEPT_SHARE):
            self.drop_oldest()

    def use(self, beginning: Beginning) -> None:
        """Note that it was of use; the others go before it."""
        if beginning in self._kept:
            self._kept.remove(beginning)
            self._kept.append(beginning)

    def make_room(self, demand: Demand) -> None:
        """Give back what stands in the way of requests that come to so much together."""
        cells, branches = self._engine.max_slots, self._engine.max_branches
        while self._kept and (
            (cells is not None and self.cells + demand.cells > cells)
            or (branches is not None and len(self._kept) + demand.branches > branches)
        ):
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Give back what was used least recently; return whether there was anything."""
        if self._kept:
            self._drop(self._kept[0])
            return True
        return False

    def close(self) -> None:
        """Give everything back."""
        while self.drop_oldest():
            pass

    def _drop(self, beginning: Beginning) -> None:
        self._kept.remove(beginning)
        self._engine.close(beginning.branch)
