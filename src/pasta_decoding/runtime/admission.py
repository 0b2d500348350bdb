"""Which requests are decoded at the same time: what they may come to, and what there is room for.

First come, first served: a request enters when all that it may come to fits beside all that those
already in may come to. So nobody is overtaken, and nobody runs out of room half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from pasta_decoding.engines.base import Engine, Limits
from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.runtime.policy import LEAST_QUOTA, Quota
from pasta_decoding.runtime.request import Request

AHEAD_SHARE = 8
"""An answer may write ahead in this part of the cells that are free when it is let in."""
THREADS_SHARE = 4
"""And has this part of the branches that are free then."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a request needs at least, or several together.

    cells:    tokens of prompt and answer.
    branches: one a thread that has begun, and one that keeps the finished chunks until main joins
              them.
    """

    cells: int
    branches: int

    def __add__(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(self.cells + other.cells, self.branches + other.branches)

    def __sub__(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(self.cells - other.cells, self.branches - other.branches)


def resources_of(
    request: Request, *, shared_tokens: int = 0, joining: Joining = Joining.kv
) -> ResourceRequest:
    """Return the most that `request` may come to beyond prompt tokens that others hold.

    Under the `text` join every token of the answer may be fed once more, and a closing a chunk.
    """
    rules = request.rules
    cells = len(request.prompt) - shared_tokens + rules.max_tokens
    if not rules.parallel:
        return ResourceRequest(cells, branches=1)
    if joining is Joining.text:
        cells += rules.max_tokens + rules.max_chunks
    return ResourceRequest(cells, branches=branches_of(request, LEAST_QUOTA.threads))


def branches_of(request: Request, threads: int) -> int:
    """Return how many branches so many threads take: the finished chunks have one, too."""
    return 1 + min(request.rules.max_chunks, threads)


def shared_prefix_len(requests: Sequence[Request]) -> int:
    """Return with how many tokens all prompts begin alike; each keeps one of its own.

    0 for a single request: there is nobody to share with.
    """
    if len(requests) < 2:
        return 0
    longest = min(len(request.prompt) for request in requests) - 1
    columns = zip(*(request.prompt[:longest] for request in requests), strict=True)
    alike = takewhile(lambda column: len(set(column)) == 1, columns)
    return sum(1 for _ in alike)


def resources_together(
    requests: Sequence[Request], joining: Joining = Joining.kv
) -> list[ResourceRequest]:
    """Return the demand of each of some requests that share the beginning of their prompts.

    What they share counts for the first one.
    """
    shared_tokens = shared_prefix_len(requests)
    first, *others = requests
    rest = [resources_of(one, shared_tokens=shared_tokens, joining=joining) for one in others]
    return [resources_of(first, joining=joining), *rest]


@dataclass(frozen=True, slots=True)
class Admission:
    """The policy. Cells and branches are what the engine has."""

    engine: Engine
    joining: Joining = Joining.kv

    def resources_together(self, requests: Sequence[Request]) -> list[ResourceRequest]:
        """Return the demand of each of some requests that are let in together."""
        return resources_together(requests, self.joining)

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could not be answered even alone."""
        check_fits(request, Limits(self.engine.vocabulary_size, self.engine.max_positions))
        demand = resources_of(request, joining=self.joining)
        _check_tokens(request, demand.cells, self.engine.max_slots, "the engine's", "cells")
        self._check_branches(demand)

    def check_together(self, demand: ResourceRequest) -> None:
        """Raise PastaError if requests that must be let in together never could be."""
        if not _within(demand.cells, self.engine.max_slots):
            raise PastaError(
                f"answers of up to {demand.cells} tokens together, prompts included, do not fit "
                f"the engine's {self.engine.max_slots} cells",
                hint="Allow fewer tokens, or give the engine more cells.",
            )
        self._check_branches(demand)

    def admits(self, demand: ResourceRequest, beside: Sequence[ResourceRequest]) -> bool:
        """Is there room for what passed a check, `beside` what is already in?"""
        together = sum(beside, demand)
        return not beside or (
            _within(together.cells, self.engine.max_slots)
            and _within(together.branches, self.engine.max_branches)
        )

    def allot(self, request: Request, taken: ResourceRequest) -> Quota:
        """Return what `request` gets of what is free beside all that is `taken`, its own included.

        It makes a step wider, never an answer different.
        """
        rules = request.rules
        if not rules.parallel:
            return LEAST_QUOTA
        free = _left(self.engine.max_slots, taken.cells, AHEAD_SHARE)
        more = _left(self.engine.max_branches, taken.branches, THREADS_SHARE)
        ahead_tokens = rules.max_tokens if free is None else min(rules.max_tokens, free)
        wanted = max(LEAST_QUOTA.threads, rules.max_threads)
        threads = wanted if more is None else min(wanted, LEAST_QUOTA.threads + more)
        return Quota(ahead_tokens, threads)

    def _check_branches(self, demand: ResourceRequest) -> None:
        branches, most = demand.branches, self.engine.max_branches
        if not _within(branches, most):
            raise PastaError(
                f"an answer of up to {branches} branches does not fit the engine's {most}",
                hint="Allow fewer chunks.",
            )


def check_fits(request: Request, limits: Limits) -> None:
    """Raise PastaError unless a model with these limits can read `request` and answer it."""
    if not request.prompt:
        raise PastaError("the prompt is empty", hint="Give at least one token of prompt.")
    tokens = resources_of(request).cells
    _check_tokens(request, tokens, limits.max_positions, "the model's", "positions")
    limits.check(request.prompt, range(len(request.prompt)))


def _check_tokens(request: Request, tokens: int, most: int | None, whose: str, what: str) -> None:
    if not _within(tokens, most):
        answer = f"an answer of up to {request.rules.max_tokens}"
        if tokens > resources_of(request).cells:
            answer += f", fed again by text joins ({tokens} in all),"
        raise PastaError(
            f"a prompt of {len(request.prompt)} tokens and {answer} do not fit {whose} {most} "
            f"{what}",
            hint="Use a shorter prompt, or allow fewer tokens for the answer.",
            code=TOO_LONG,
        )


def _left(most: int | None, taken: int, share: int) -> int | None:
    return None if most is None else max(0, most - taken) // share


def _within(number: int, most: int | None) -> bool:
    return most is None or number <= most
