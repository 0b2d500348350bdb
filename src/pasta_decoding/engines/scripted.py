"""An engine without a model: the next token follows a script. For tests of everything above.

It keeps the same books as the torch engine, so forks, joins, limits and leaks behave alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pasta_decoding.engines.base import Branch, Feed, FloatArray
from pasta_decoding.engines.pool import Limits
from pasta_decoding.engines.request_table import RequestTable, Work

Script = Callable[[tuple[int, ...]], FloatArray]
"""From the ids that a branch sees to logits_V. The ids are those of the branches that were joined
on the way, oldest branch first, then the branch's own path (what it and its ancestors wrote),
prompt to last token. So they end with what the branch wrote, and do not depend on how fast the
others were."""


def follow(*lines: Sequence[int], vocabulary_size: int, otherwise: int = 0) -> Script:
    """Return a script that continues lines, from wherever the ids seen end like a line's beginning.

    The longest such beginning wins. The next token is `otherwise` when none fits.

    >>> script = follow((1, 2, 3), (9, 2, 4), vocabulary_size=10)
    >>> int(script((5, 1, 2)).argmax()), int(script((9, 2)).argmax())
    (3, 4)
    """
    following = {tuple(line[:n]): line[n] for line in lines for n in range(1, len(line))}
    longest = max(map(len, following), default=0)

    def script(seen: tuple[int, ...]) -> FloatArray:
        logits_V = np.zeros(vocabulary_size, dtype=np.float32)
        ends = (seen[-n:] for n in range(min(longest, len(seen)), 0, -1))
        logits_V[next((following[end] for end in ends if end in following), otherwise)] = 10
        return logits_V

    return script


def shuffled(vocabulary_size: int, seed: int = 0) -> Script:
    """Return a script of arbitrary logits that change with every single id seen."""

    def script(seen: tuple[int, ...]) -> FloatArray:
        noise = np.random.default_rng((seed, *seen))
        return noise.standard_normal(vocabulary_size, dtype=np.float32)

    return script


@dataclass(slots=True)
class _Tokens:
    """What stands in the cells of a request, and who wrote it."""

    ids: list[int] = field(default_factory=list)
    writers: list[Branch] = field(default_factory=list)


class ScriptedEngine:
    """Implements `Engine` by asking a script. `steps` lists everything it was fed."""

    def __init__(
        self,
        script: Script,
        vocabulary_size: int,
        max_positions: int = 4096,
        *,
        max_cells: int | None = None,
        max_branches: int | None = None,
    ) -> None:
        self.steps: list[tuple[Feed, ...]] = []
        self._script = script
        self._parents: dict[Branch, Branch] = {}
        limits = Limits(vocabulary_size, max_positions, max_cells, max_branches)
        self._table: RequestTable[_Tokens] = RequestTable(limits)

    @property
    def name(self) -> str:
        """See `Engine`."""
        return "scripted"

    @property
    def vocabulary_size(self) -> int:
        """See `Engine`."""
        return self._table.limits.vocabulary_size

    @property
    def max_positions(self) -> int:
        """See `Engine`."""
        return self._table.limits.max_positions

    @property
    def free_positions(self) -> bool:
        """See `Engine`."""
        return True

    @property
    def cells_in_use(self) -> int:
        """See `Engine`."""
        return self._table.cells_in_use

    @property
    def max_cells(self) -> int | None:
        """See `Engine`."""
        return self._table.limits.max_cells

    @property
    def max_branches(self) -> int | None:
        """See `Engine`."""
        return self._table.limits.max_branches

    def open(self, *, reserved_tokens: int) -> Branch:
        """See `Engine`."""
        return self._table.open(_Tokens(), reserved_tokens)

    def fork(self, parent: Branch) -> Branch:
        """See `Engine`."""
        child = self._table.fork(parent)
        self._parents[child] = parent
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """See `Engine`."""
        self._table.join(parent, children)

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        """See `Engine`."""
        given, taken = self._table.copy(source, target, tokens)
        taken.ids, taken.writers = given.ids[:tokens], [target] * tokens

    def shrink(self, branch: Branch, tokens: int) -> None:
        """See `Engine`."""
        kept = self._table.shrink(branch, tokens)
        kept.ids, kept.writers = kept.ids[:tokens], kept.writers[:tokens]

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`."""
        wanted = sum(feed.wants_logits for feed in feeds)
        logits_FV = np.empty((wanted, self.vocabulary_size), dtype=np.float32)
        works = self._table.plan(feeds)
        self.steps.append(tuple(feeds))
        for work in works:
            for feed in work.feeds:
                work.store.ids.extend(feed.ids)
                work.store.writers.extend([feed.branches[0]] * len(feed.ids))
            askers = (feed.branches[0] for feed in work.feeds if feed.wants_logits)
            for row, query, branch in zip(work.rows, work.step.wanted, askers, strict=True):
                logits_FV[row] = self._script(self._seen(work, query, branch))
        return logits_FV

    def close(self, branch: Branch) -> None:
        """See `Engine`."""
        self._table.close(branch)

    def _seen(self, work: Work[_Tokens], query: int, branch: Branch) -> tuple[int, ...]:
        """Return the ids that a query of `branch` sees, in the order that `Script` tells."""
        cells = np.flatnonzero(work.step.mask_QK[query]).tolist()
        line = self._line(branch)
        writers, ids = work.store.writers, work.store.ids
        joined = sorted((writers[cell], cell) for cell in cells if writers[cell] not in line)
        path = (cell for cell in cells if writers[cell] in line)
        return tuple(ids[cell] for cell in (*(cell for _, cell in joined), *path))

    def _line(self, branch: Branch) -> set[Branch]:
        """`branch` and all it descends from."""
        line = {branch}
        while branch in self._parents:
            line.add(branch := self._parents[branch])
        return line
