"""Room in the KV cache: which requests are let in, and which prefixes of ended answers stay.

First come, first served: a request enters when its largest need fits next to the largest needs of
the running ones. So no request is overtaken, and none runs out of room half-way.

A conversation's next turn begins with the last one's prompt, and many prompts with one system
prompt: prefixes of ended answers stay in the cache. They take only free room, and go, least
recently used first, when a request needs it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pasta_decoding.answer.request import Request
from pasta_decoding.engines.base import Branch, Engine, Limits
from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import MAIN, Joining

if TYPE_CHECKING:
    from pasta_decoding.scheduling.generation import Generation

Ids = tuple[int, ...]

AHEAD_SHARE = 8
"""An answer may write ahead in 1 / AHEAD_SHARE of the slots that are free at its admission."""
THREADS_SHARE = 4
"""It gets 1 / THREADS_SHARE of the branches that are free then."""
LEAST_SHARED = 16
"""Fewer tokens of a prefix are computed sooner than they are copied."""
MOST_KEPT = 32
"""Prefixes at a time: each takes a branch of the engine."""
KEPT_SHARE = 2
"""They take at most 1 / KEPT_SHARE of the engine's slots."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one answer was given beyond the least that it can be written with.

    ahead_tokens: tokens that may be written beyond its budget, to be trimmed.
    threads:      threads that may have begun and not ended, main included; at least two.
    """

    ahead_tokens: int
    threads: int


LEAST_QUOTA = Quota(ahead_tokens=0, threads=2)
"""Main, and the chunk that it waits for: an answer of any width can be written with them."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a request needs, or several together.

    slots:    tokens of prompt and answer.
    branches: one a thread that has begun, and one that keeps the finished chunks until main joins
              them.
    """

    slots: int
    branches: int

    def __add__(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(self.slots + other.slots, self.branches + other.branches)


def resources_of(
    request: Request, joining: Joining = Joining.kv, quota: Quota = LEAST_QUOTA
) -> ResourceRequest:
    """Return the most that `request` may come to with a quota.

    Under the `text` join every token of the answer may be fed once more, and a closing a chunk.
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
    return _within(needed.slots, engine.max_slots) and _within(needed.branches, engine.max_branches)


def quota_of(request: Request, engine: Engine, taken: ResourceRequest) -> Quota:
    """Return the quota of `request` in the room beyond `taken`, its own need included.

    It makes a step wider, never an answer different.
    """
    rules = request.rules
    if not rules.parallel:
        return LEAST_QUOTA
    ahead_tokens, threads = rules.max_tokens, max(LEAST_QUOTA.threads, rules.max_threads)
    if (slots := engine.max_slots) is not None:
        ahead_tokens = min(ahead_tokens, max(0, slots - taken.slots) // AHEAD_SHARE)
    if (branches := engine.max_branches) is not None:
        free = max(0, branches - taken.branches) // THREADS_SHARE
        threads = min(threads, LEAST_QUOTA.threads + free)
    return Quota(ahead_tokens, threads)


def check_request(request: Request, engine: Engine, joining: Joining) -> None:
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


def _check_tokens(request: Request, tokens: int, most: int | None, whose: str, what: str) -> None:
    if not _within(tokens, most):
        answer = f"an answer of up to {request.rules.max_tokens}"
        if tokens > resources_of(request).slots:
            answer += f", fed again by text joins ({tokens} in all),"
        message = f"a prompt of {len(request.prompt)} tokens and {answer} do not fit"
        raise PastaError(f"{message} {whose} {most} {what}", code=TOO_LONG)


def _within(number: int, most: int | None) -> bool:
    return most is None or number <= most


def common_prefix_len(one: Sequence[int], other: Sequence[int]) -> int:
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def longest_prefix(ids: Ids, ordered: Sequence[Ids]) -> tuple[int, int]:
    """Return how much of `ids` some of `ordered`, which are sorted, begin with, and which one.

    Sorted, those that have most in common stand next to each other.
    """
    place = bisect_left(ordered, ids)
    beside = range(max(0, place - 1), min(len(ordered), place + 1))
    return max(((common_prefix_len(ordered[n], ids), n) for n in beside), default=(0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixEntry:
    """Tokens that a request was fed first, and a branch that sees them."""

    ids: Ids
    branch: Branch


@dataclass(eq=False)
class PrefixCache:
    """Entries, least recently used first. Each has a shrunk request of the engine."""

    _engine: Engine
    _kept: list[PrefixEntry] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return sum(len(one.ids) for one in self._kept)

    def begin(
        self, prompts: Sequence[Generation], running: Sequence[Generation]
    ) -> list[Generation]:
        """Start prompts from held prefixes; return all but those that one before them soon shares.

        They wait for it: then it holds more of them than anything does now.
        """
        if all(one.prefilled_tokens for one in prompts):
            return list(prompts)
        fed = [
            PrefixEntry(one.request.prompt[: one.prefilled_tokens], one.live[MAIN])
            for one in running
            if one.prefilled_tokens
        ]
        entries = sorted([*self._kept, *fed], key=lambda one: one.ids)
        held, to_come = [one.ids for one in entries], list[Ids]()
        begun: list[Generation] = []
        for one in prompts:
            ids = one.request.prompt[:-1]  # the last one is fed, for logits
            if not one.prefilled_tokens:
                shared, place = longest_prefix(ids, held)
                if longest_prefix(ids, to_come)[0] >= max(LEAST_SHARED, shared + 1):
                    continue
                if shared >= LEAST_SHARED:
                    self._use(entries[place])
                    one.copy_prefix(entries[place].branch, shared)
            insort(to_come, one.request.prompt)
            begun.append(one)
        return begun

    def keep(self, entry: PrefixEntry) -> None:
        """Take over the last branch of a request, to be kept or closed: no prefix is kept twice."""
        tokens = len(entry.ids)
        for one in list(self._kept):
            shared = common_prefix_len(one.ids, entry.ids)
            if shared == tokens:
                self._use(one)
                self._engine.close(entry.branch)
                return
            if shared == len(one.ids):
                self._drop(one)
        self._kept.append(entry)
        most = self._engine.max_slots
        while len(self._kept) > MOST_KEPT or not _within(self.slots * KEPT_SHARE, most):
            self.drop_oldest()

    def make_room(self, needed: ResourceRequest) -> None:
        """Drop prefixes until requests that need `needed` together fit."""
        while self._kept and not has_room(
            self._engine, needed + ResourceRequest(self.slots, len(self._kept))
        ):
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Return whether there was one."""
        if not self._kept:
            return False
        self._drop(self._kept[0])
        return True

    def close(self) -> None:
        while self.drop_oldest():
            pass

    def _use(self, entry: PrefixEntry) -> None:
        """Mark an entry as just used, if it is kept and not a running answer's."""
        if entry in self._kept:
            self._kept.remove(entry)
            self._kept.append(entry)

    def _drop(self, entry: PrefixEntry) -> None:
        self._kept.remove(entry)
        self._engine.close(entry.branch)
