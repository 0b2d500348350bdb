"""The part of an engine that is its `KVCache`: limits, slots and branches."""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.engines.base import Branch, Limits
from pasta_decoding.engines.kv_cache import KVCache


class CachedEngine:
    """`Engine` without `name`, `copy` and `step`: what engines over a `KVCache` have in common."""

    free_positions = True

    def __init__(self, limits: Limits, *, in_one_piece: bool = True) -> None:
        self.vocabulary_size, self.max_positions = limits.vocabulary_size, limits.max_positions
        self.max_slots, self.max_branches = limits.max_slots, limits.max_branches
        self._cache = KVCache(limits, in_one_piece=in_one_piece)

    @property
    def slots_in_use(self) -> int:
        return self._cache.slots_in_use

    def open(self, *, reserved_tokens: int) -> Branch:
        return self._cache.open(reserved_tokens)

    def fork(self, parent: Branch) -> Branch:
        return self._cache.fork(parent)

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        self._cache.join(parent, children)

    def shrink(self, branch: Branch, tokens: int) -> None:
        self._cache.shrink(branch, tokens)

    def close(self, branch: Branch) -> None:
        self._cache.close(branch)
