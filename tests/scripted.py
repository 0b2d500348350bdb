"""An engine without a model, for tests of everything above: the next token follows a script."""

from collections.abc import Callable, Sequence

import numpy as np

from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import CachedEngine

Script = Callable[[tuple[int, ...]], FloatArray]
"""From the ids that a branch sees to logits_V. The ids are those of the branches that were joined
on the way, oldest branch first, then the branch's own path (what it and its ancestors wrote),
prompt to last token. So they end with what the branch wrote, and do not depend on how fast the
others were."""


def follow(*lines: Sequence[int], vocabulary_size: int, otherwise: int = 0) -> Script:
    """Return a script that continues lines, from wherever the ids seen end like a line's beginning.

    The longest such beginning wins: with lines 1 2 3 and 9 2 4, the next token after 5 1 2 is 3.
    The next token is `otherwise` when none fits.
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


class ScriptedEngine(CachedEngine):
    """Implements `Engine` by asking a script. `steps` lists everything it was fed."""

    name = "scripted"

    def __init__(
        self,
        script: Script,
        vocabulary_size: int,
        max_positions: int = 4096,
        *,
        max_slots: int | None = None,
        max_branches: int | None = None,
    ) -> None:
        limits = Limits(vocabulary_size, max_positions, max_slots, max_branches)
        super().__init__(limits, in_one_piece=False)
        self.steps: list[tuple[Feed, ...]] = []
        self._script = script
        self._parents: dict[Branch, Branch] = {}
        self._tokens: dict[int, tuple[int, Branch]] = {}  # slot -> its token and who wrote it

    def fork(self, parent: Branch) -> Branch:
        child = super().fork(parent)
        self._parents[child] = parent
        return child

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        source_slots, target_slots = self.mark_copied(source, target, tokens)
        for index in range(tokens):
            id_, _ = self._tokens[source_slots.start + index]
            self._tokens[target_slots.start + index] = (id_, target)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        batch = self.plan(feeds)
        self.steps.append(tuple(feeds))
        rows = []
        for item in batch.items:
            for feed, seen in zip(item.feeds, item.seen, strict=True):
                branch, written = feed.branches[0], seen[-len(feed.ids) :].tolist()
                self._tokens |= {k: (id_, branch) for k, id_ in zip(written, feed.ids, strict=True)}
                if feed.wants_logits:
                    rows.append(self._script(self._seen(seen.tolist(), branch)))
        logits_FV = np.array(rows, dtype=np.float32).reshape(-1, self.vocabulary_size)
        return logits_FV if batch.order is None else logits_FV[batch.order]

    def _seen(self, slots: list[int], branch: Branch) -> tuple[int, ...]:
        """Return the ids in `slots`, which `branch` sees, in the order of `Script`."""
        line = {branch}
        while branch in self._parents:
            line.add(branch := self._parents[branch])
        tokens = [self._tokens[slot] for slot in sorted(slots)]
        joined = [token for token in tokens if token[1] not in line]
        path = [id_ for id_, writer in tokens if writer in line]
        return (*(id_ for id_, _ in sorted(joined, key=lambda token: token[1])), *path)
