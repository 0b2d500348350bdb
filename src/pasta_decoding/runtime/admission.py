"""Which requests are decoded at the same time: their largest needs, and the room for them.

First come, first served: a request enters when its largest need fits next to the largest needs of
the running ones. So no request is overtaken, and none runs out of room half-way.
"""

from __future__ import annotations

from dataclasses import dataclass

from pasta_decoding.engines.base import Engine, Limits
from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.runtime.policy import LEAST_QUOTA, Quota
from pasta_decoding.runtime.request import Request

AHEAD_SHARE = 8
"""An answer may write ahead in 1 / AHEAD_SHARE of the slots that are free at its admission."""
THREADS_SHARE = 4
"""It gets 1 / THREADS_SHARE of the branches that are free then."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a request needs, or several together.

    cells:    tokens of prompt and answer.
    branches: one a thread that has begun, and one that keeps the finished chunks until main joins
              them.
    """

    cells: int
    branches: int

    def __add__(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(self.cells + other.cells, self.branches + other.branches)


def resources_of(
    request: Request, joining: Joining = Joining.kv, quota: Quota = LEAST_QUOTA
) -> ResourceRequest:
    """Return the most that `request` may come to with a quota.

    Under the `text` join every token of the answer may be fed once more, and a closing a chunk.
    """
    rules = request.rules
    cells = len(request.prompt) + rules.max_tokens
    if not rules.parallel:
        return ResourceRequest(cells, branches=1)
    if joining is Joining.text:
        cells += rules.max_tokens + rules.max_chunks
    branches = 1 + min(rules.max_chunks, quota.threads)
    return ResourceRequest(cells + quota.ahead_tokens, branches)


def has_room(engine: Engine, demand: ResourceRequest) -> bool:
    """Do requests that need `demand` together fit the engine?"""
    return _within(demand.cells, engine.max_slots) and _within(demand.branches, engine.max_branches)


def quota_of(request: Request, engine: Engine, taken: ResourceRequest) -> Quota:
    """Return the quota of `request` in the room beyond `taken`, its own need included.

    It makes a step wider, never an answer different.
    """
    rules = request.rules
    if not rules.parallel:
        return LEAST_QUOTA
    ahead_tokens, threads = rules.max_tokens, max(LEAST_QUOTA.threads, rules.max_threads)
    if (slots := engine.max_slots) is not None:
        ahead_tokens = min(ahead_tokens, max(0, slots - taken.cells) // AHEAD_SHARE)
    if (branches := engine.max_branches) is not None:
        free = max(0, branches - taken.branches) // THREADS_SHARE
        threads = min(threads, LEAST_QUOTA.threads + free)
    return Quota(ahead_tokens, threads)


def check_request(request: Request, engine: Engine, joining: Joining) -> None:
    """Raise PastaError if `request` could not be answered even alone."""
    check_fits(request, Limits(engine.vocabulary_size, engine.max_positions))
    demand = resources_of(request, joining)
    _check_tokens(request, demand.cells, engine.max_slots, "the engine's", "cells")
    if not _within(demand.branches, engine.max_branches):
        raise PastaError(
            f"an answer of up to {demand.branches} branches does not fit the engine's "
            f"{engine.max_branches}",
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


def _within(number: int, most: int | None) -> bool:
    return most is None or number <= most
