"""Admission: which requests may enter the engine's KV cache now, and with how many resources.

First come, first served: a request enters when its largest need fits next to the largest needs of
the running ones. So no request is overtaken, and no answer runs out of room.
"""

from __future__ import annotations

from dataclasses import dataclass

from pasta_decoding.answer.request import Request
from pasta_decoding.engines.base import Engine, Limits
from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import Joining

AHEAD_DIVISOR = 8
"""An answer may write ahead in 1 / AHEAD_DIVISOR of the slots that are free at its admission."""
THREADS_DIVISOR = 4
"""It gets 1 / THREADS_DIVISOR of the branches that are free then."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How wide one answer may become. A larger quota changes its steps, never its text.

    ahead_tokens: tokens that may be written beyond its budget, to be trimmed later.
    threads:      threads that may be open at a time, main included; at least two.
    """

    ahead_tokens: int
    threads: int


MIN_QUOTA = Quota(ahead_tokens=0, threads=2)
"""Any answer can be written with main and the chunk that main waits for."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What one answer, or several together, may take of an engine.

    slots:    tokens of prompt and answer.
    branches: one for each open thread, and one for the finished chunks until main joins them.
    """

    slots: int
    branches: int

    def __add__(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(self.slots + other.slots, self.branches + other.branches)


def resources_of(
    request: Request, joining: Joining = Joining.kv, quota: Quota = MIN_QUOTA
) -> ResourceRequest:
    """Return the largest need that `request` can have with a quota.

    The `text` join may feed every token of the answer a second time, and a closing for each chunk.
    """
    rules = request.rules
    slots = len(request.prompt) + rules.max_tokens
    if not rules.parallel:
        return ResourceRequest(slots, branches=1)
    if joining is Joining.text:
        slots += rules.max_tokens + rules.max_chunks
    branches = 1 + min(rules.max_chunks, quota.threads)
    return ResourceRequest(slots + quota.ahead_tokens, branches)


def has_room(engine: Engine, needed: ResourceRequest) -> bool:
    """Return whether the engine can hold answers that need `needed` together."""
    fits_slots = _within(needed.slots, engine.max_slots)
    return fits_slots and _within(needed.branches, engine.max_branches)


def quota_of(request: Request, engine: Engine, taken: ResourceRequest) -> Quota:
    """Return the quota that an engine with `taken` resources has for `request`.

    `taken` includes what `request` needs with MIN_QUOTA.
    """
    rules = request.rules
    if not rules.parallel:
        return MIN_QUOTA
    ahead_tokens = rules.max_tokens
    if engine.max_slots is not None:
        free_slots = max(0, engine.max_slots - taken.slots)
        ahead_tokens = min(ahead_tokens, free_slots // AHEAD_DIVISOR)
    threads = max(MIN_QUOTA.threads, rules.max_threads)
    if engine.max_branches is not None:
        free_branches = max(0, engine.max_branches - taken.branches)
        threads = min(threads, MIN_QUOTA.threads + free_branches // THREADS_DIVISOR)
    return Quota(ahead_tokens, threads)


def check_request(request: Request, engine: Engine, joining: Joining) -> None:
    """Raise PastaError unless an engine without other requests can answer `request`."""
    check_fits(request, Limits(engine.vocabulary_size, engine.max_positions))
    needed = resources_of(request, joining)
    _check_tokens(request, needed.slots, engine.max_slots, "the engine's", "slots")
    if not _within(needed.branches, engine.max_branches):
        message = f"an answer of up to {needed.branches} branches does not fit the engine's"
        raise PastaError(f"{message} {engine.max_branches}")


def check_fits(request: Request, limits: Limits) -> None:
    """Raise PastaError unless a model with these limits can read `request` and answer it."""
    if not request.prompt:
        raise PastaError("the prompt is empty")
    tokens = resources_of(request).slots
    _check_tokens(request, tokens, limits.max_positions, "the model's", "positions")
    limits.check(request.prompt, range(len(request.prompt)))


def _check_tokens(
    request: Request, tokens: int, limit: int | None, owner: str, resource: str
) -> None:
    """Raise PastaError if `tokens` exceed a limit, for example `the engine's` 50 `slots`."""
    if _within(tokens, limit):
        return
    answer = f"an answer of up to {request.rules.max_tokens}"
    if tokens > resources_of(request).slots:
        answer += f", fed again by text joins ({tokens} in all),"
    message = f"a prompt of {len(request.prompt)} tokens and {answer} do not fit"
    raise PastaError(f"{message} {owner} {limit} {resource}", code=TOO_LONG)


def _within(number: int, limit: int | None) -> bool:
    return limit is None or number <= limit
