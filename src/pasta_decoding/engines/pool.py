"""The cells of a request and who sees which: integers and booleans, no model.

A cell holds one token; cells are given out in the order of feeding and never again. Visibility is
one row of booleans a branch, so fork is a copy of a row and join an `or`. Every engine that has no
such bookkeeping of its own shares this one.

Shapes: Q tokens of one step, K cells used so far (the step's own included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.errors import PastaError

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can take: token ids and positions lie below the first two.

    max_cells, max_branches: what all requests together may take; None: any number.
    """

    vocabulary_size: int
    max_positions: int
    max_cells: int | None = None
    max_branches: int | None = None

    def check(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Refuse ids and positions that the model does not have."""
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            bad = next(i for i in ids if not 0 <= i < self.vocabulary_size)
            raise PastaError(
                f"token id {bad} is outside the model's vocabulary of {self.vocabulary_size}",
                hint="use the tokenizer that belongs to the model",
            )
        if max(positions) >= self.max_positions:
            raise PastaError(
                f"position {max(positions)} is past the model's last, {self.max_positions - 1}",
                hint="use a shorter prompt or allow fewer tokens for the answer",
            )
        assert min(positions) >= 0, "positions are not negative"


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass over one request's cells must compute.

    first_cell: the Q tokens go into cells first_cell..
    mask_QK:    may query token q attend to cell k? No row is empty: each sees itself.
    cell_positions_K: the position of each cell's token, for windows.
    wanted:     which of the Q tokens logits are wanted for, in the order of the feeds.
    """

    first_cell: int
    ids: list[int]
    positions: list[int]
    mask_QK: BoolArray
    cell_positions_K: npt.NDArray[np.int64]
    wanted: list[int]


class Pool:
    """One request's cells. Checks first, then writes: a refused step leaves no trace."""

    def __init__(self, limits: Limits, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._limits = limits
        self._forked_at: int | None = None
        self._rows: dict[Branch, BoolArray] = {}
        self._positions = np.zeros(capacity, dtype=np.int64)

    @property
    def is_open(self) -> bool:
        """Whether any branch is."""
        return bool(self._rows)

    @property
    def line(self) -> int:
        """How many tokens were fed before the first fork: every branch sees them."""
        return self.used if self._forked_at is None else self._forked_at

    def start(self, branch: Branch) -> None:
        """Open the request's first branch, which sees nothing."""
        self._rows[branch] = np.zeros(self.capacity, dtype=np.bool_)

    def fork(self, parent: Branch, child: Branch) -> None:
        """Open `child`, which sees what `parent` sees."""
        self._forked_at = self.line
        self._rows[child] = self._rows[parent].copy()

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """Show `parent` what `children` see, and close them."""
        assert parent not in children, "a branch cannot join itself"
        assert all(child in self._rows for child in children), "a request joins its own branches"
        for child in children:
            self._rows[parent] |= self._rows.pop(child)

    def copy(self, source: Pool, tokens: int) -> None:
        """Begin with the first tokens of another request."""
        assert not self.used, "a copy goes where nothing was fed"
        assert 0 < tokens <= min(source.line, self.capacity), "those fed before the first fork"
        (row,) = self._rows.values()
        row[:tokens] = True
        self._positions[:tokens] = source._positions[:tokens]
        self.used = tokens

    def shrink(self, branch: Branch, tokens: int) -> None:
        """Hold the first tokens and nothing else, for the one branch that is left."""
        assert self._rows.keys() == {branch}, "others see the cells, too"
        assert 0 < tokens <= self.line, "those fed before the first fork"
        self.capacity = self.used = tokens
        self._rows[branch] = np.ones(tokens, dtype=np.bool_)
        self._positions, self._forked_at = self._positions[:tokens].copy(), None

    def close(self, branch: Branch) -> None:
        """Forget what `branch` sees. Its cells stay taken until the request ends."""
        del self._rows[branch]

    def check(self, feeds: Sequence[Feed]) -> None:
        """Refuse what does not fit into the cells or the model; assert what no caller may do."""
        for feed in feeds:
            assert len(feed.ids) == len(feed.positions) > 0, "a feed has a position for each token"
            assert all(b in self._rows for b in feed.branches), "a feed stays within its request"
            self._limits.check(feed.ids, feed.positions)
        fed = sum(len(feed.ids) for feed in feeds)
        if self.used + fed > self.capacity:
            raise PastaError(
                f"no room for {fed} more tokens: the request holds {self.used} of at most "
                f"{self.capacity}",
                hint="allow fewer tokens for the answer, or open the request with more room",
            )

    def write(self, feeds: Sequence[Feed]) -> Step:
        """Give the feeds' tokens their cells, and say what each of them sees."""
        first, queries = self.used, sum(len(feed.ids) for feed in feeds)
        end = first + queries
        mask_QK = np.empty((queries, end), dtype=np.bool_)
        step = Step(first, [], [], mask_QK, self._positions[:end], [])
        for feed in feeds:
            self._write(feed, step)
        return step

    def _write(self, feed: Feed, step: Step) -> None:
        start, end = self.used, self.used + len(feed.ids)
        row, *others = [self._rows[branch] for branch in feed.branches]
        assert all(np.array_equal(row, other) for other in others), "branches fed together differ"
        mask_QK = step.mask_QK[start - step.first_cell : end - step.first_cell]
        mask_QK[:] = row[: mask_QK.shape[1]]
        mask_QK[:, start:end] = np.tri(end - start, dtype=np.bool_)
        for seen in (row, *others):
            seen[start:end] = True
        self._positions[start:end] = feed.positions
        step.ids.extend(feed.ids)
        step.positions.extend(feed.positions)
        if feed.wants_logits:
            step.wanted.append(len(step.ids) - 1)
        self.used = end
