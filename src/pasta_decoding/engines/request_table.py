"""Which branch belongs to which request: the bookkeeping that engines with a pool share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.engines.pool import Limits, Pool, Step
from pasta_decoding.errors import PastaError

Store = TypeVar("Store")


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest(Generic[Store]):
    """One `open`: who sees what, and what the engine itself stores for the cells."""

    pool: Pool
    store: Store


@dataclass(frozen=True, slots=True)
class Work(Generic[Store]):
    """One request's part of a step. `rows`: where its logits go among the step's rows."""

    store: Store
    feeds: list[Feed]
    step: Step
    rows: list[int]


class RequestTable(Generic[Store]):
    """All open requests of an engine. A request goes, store and all, with its last branch."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._requests: dict[Branch, OpenRequest[Store]] = {}
        self._names = count()

    @property
    def cells_in_use(self) -> int:
        """See `Engine`."""
        return sum(request.pool.used for request in set(self._requests.values()))

    def open(self, store: Store, reserved_tokens: int) -> Branch:
        """Enter a request; return its first branch."""
        assert reserved_tokens > 0, "that is a number of tokens"
        self._check_cells(reserved_tokens)
        request = OpenRequest(Pool(self.limits, reserved_tokens), store)
        branch = self._enter(request)
        request.pool.start(branch)
        return branch

    def fork(self, parent: Branch) -> Branch:
        """See `Engine`."""
        request = self._request(parent)
        child = self._enter(request)
        request.pool.fork(parent, child)
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """See `Engine`."""
        self._request(parent).pool.join(parent, children)
        for child in children:
            del self._requests[child]

    def copy(self, source: Branch, target: Branch, tokens: int) -> tuple[Store, Store]:
        """See `Engine`. Returns the stores of both."""
        giver, taker = self._request(source), self._request(target)
        taker.pool.copy(giver.pool, tokens)
        return giver.store, taker.store

    def shrink(self, branch: Branch, tokens: int) -> Store:
        """See `Engine`. Returns the store of the request."""
        request = self._request(branch)
        request.pool.shrink(branch, tokens)
        return request.store

    def close(self, branch: Branch) -> Store | None:
        """See `Engine`. Returns the store of the request if that was its last branch."""
        request = self._request(branch)
        request.pool.close(branch)
        del self._requests[branch]
        return None if request.pool.is_open else request.store

    def plan(self, feeds: Sequence[Feed]) -> list[Work[Store]]:
        """Split a step by request, check all of it, then write it down."""
        shares: dict[OpenRequest[Store], tuple[list[Feed], list[int]]] = {}
        wanted = count()
        for feed in feeds:
            own, rows = shares.setdefault(self._request(feed.branches[0]), ([], []))
            own.append(feed)
            rows.extend([next(wanted)] if feed.wants_logits else [])
        for request, (own, _) in shares.items():
            request.pool.check(own)
        return [
            Work(request.store, own, request.pool.write(own), rows)
            for request, (own, rows) in shares.items()
        ]

    def _check_cells(self, reserved_tokens: int) -> None:
        taken = sum(request.pool.capacity for request in set(self._requests.values()))
        most = self.limits.max_cells
        if most is not None and taken + reserved_tokens > most:
            raise PastaError(
                f"no room for {reserved_tokens} tokens: {taken} of the engine's {most} cells are "
                "taken",
                hint="allow fewer tokens for the answer, or run fewer requests at a time",
            )

    def _enter(self, request: OpenRequest[Store]) -> Branch:
        most = self.limits.max_branches
        if most is not None and len(self._requests) >= most:
            raise PastaError(
                f"the engine's {most} branches are all in use",
                hint="allow fewer threads, or run fewer requests at a time",
            )
        branch = Branch(next(self._names))
        self._requests[branch] = request
        return branch

    def _request(self, branch: Branch) -> OpenRequest[Store]:
        assert branch in self._requests, f"branch {branch} is not open"
        return self._requests[branch]
