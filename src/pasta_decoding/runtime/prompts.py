"""Which prompt tokens go into a step: how many, whose, and which need not be computed at all.

What a text join reads again is fed like a prompt: it may be as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.engines.base import Engine
from pasta_decoding.runtime.generation import Generation, Row
from pasta_decoding.runtime.kept_prompts import Beginning, KeptPrompts, alike
from pasta_decoding.runtime.prompt_pace import PromptPace

LEAST_SHARED = 16
"""Fewer tokens are computed sooner than they are copied."""


class Prompts:
    """The prompts of a scheduler's requests.

    keeps: whether they share what they begin with alike, or each is computed for itself.
    kept:  what ended answers left for those that begin alike.
    """

    def __init__(self, engine: Engine, pace: PromptPace, *, keeps: bool) -> None:
        self.pace = pace
        self.kept = KeptPrompts(engine)
        self._keeps = keeps

    def ready(self, running: Sequence[Generation]) -> list[Generation]:
        """Return those of `running`, oldest first, whose prompts can be fed; call before a step.

        A prompt begins with what the cache holds of it; while more of that is about to come, it
        waits.
        """
        unfed = [one for one in running if one.unfed and one.branches.live]
        return [one for one in unfed if self._begins(one, running)]

    def rows(self, ready: Sequence[Generation], width: int) -> list[Row]:
        """Return what a step feeds of the prompts that are `ready`, beside `width` threads."""
        if not ready:
            return []
        shares = share_out([one.next_prompt_tokens for one in ready], self.pace.tokens(width))
        return [one.take_prompt(n) for one, n in zip(ready, shares, strict=True) if n]

    def keep(self, ending: Generation) -> None:
        """Keep what an answer that ends was fed first."""
        beginning = ending.beginning if self._keeps else None
        if beginning is not None and len(beginning.ids) >= LEAST_SHARED:
            ending.branches.part_with_main()
            self.kept.keep(beginning)

    def _begins(self, coming: Generation, running: Sequence[Generation]) -> bool:
        """Let a prompt begin with what the cache holds; False if more of it is about to come."""
        if not self._keeps or coming.was_fed or len(coming.family) > 1:
            return True
        ids = coming.request.prompt[:-1]  # the last one is fed, for logits
        found = [(alike(one.ids, ids), one) for one in self._beginnings(running)]
        shared, best = max(found, key=lambda pair: pair[0], default=(0, None))
        older = running[: running.index(coming)]
        to_come = [
            alike(one.request.prompt, ids) for one in older if one.unfed and len(one.family) == 1
        ]
        if max(to_come, default=0) >= max(LEAST_SHARED, shared + 1):
            return False
        if best is not None and shared >= LEAST_SHARED:
            self.kept.use(best)
            coming.begin_like(best.branch, shared)
        return True

    def _beginnings(self, running: Sequence[Generation]) -> list[Beginning]:
        found = [one.beginning for one in running if one.was_fed]
        return [*self.kept, *(one for one in found if one is not None)]


def share_out(wanted: Sequence[int], tokens: int) -> list[int]:
    """Return how many of `tokens` each prompt gets, that wants so many; the oldest comes first.

    The shortest first, so that nobody waits for a long one; but the oldest has half of them.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    left = tokens
    if order[0] != 0:
        shares[0] = min(wanted[0], -(-tokens // 2))
        left -= shares[0]
    for place in order:
        more = min(wanted[place] - shares[place], left)
        shares[place] += more
        left -= more
    return shares
