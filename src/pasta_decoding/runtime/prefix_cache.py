"""Prompts: what the cache holds of them already, and how much of the rest each step feeds.

A conversation's next turn begins with the last one's prompt, and many prompts with one system
prompt: prefixes of ended answers stay in the cache. They take only free room, and go, least
recently used first, when a request needs it.

Prompt tokens go into the pass of the threads that write, which then takes longer. That time is paid
from a budget to which each step adds a share of what it takes with threads alone. So a long prompt
slows a stream next to it by a known factor. What a text join reads again is fed like a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pasta_decoding.engines.base import BATCH_TOKENS, Engine
from pasta_decoding.runtime.admission import ResourceRequest
from pasta_decoding.runtime.generation import LEAST_SHARED, Generation, PrefixEntry
from pasta_decoding.runtime.policy import StepCost

Ids = tuple[int, ...]

MOST_KEPT = 32
"""Beginnings at a time: each takes a branch of the engine."""
KEPT_SHARE = 2
"""Prefixes take at most 1 / KEPT_SHARE of the engine's slots."""


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


class PrefixCache:
    """The beginnings, least recently used first. Each has a shrunk request of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: list[PrefixEntry] = []

    @property
    def cells(self) -> int:
        return sum(len(one.ids) for one in self._kept)

    def begin(
        self, prompts: Sequence[Generation], running: Sequence[Generation]
    ) -> list[Generation]:
        """Start prompts from held prefixes; return those that may be fed now.

        Of the others, a running prompt before them soon holds more than anything does now.
        """
        if all(one.prefilled_tokens for one in prompts):
            return list(prompts)
        entries = [*self._kept, *(one.prompt_fed for one in running if one.prefilled_tokens)]
        entries.sort(key=lambda one: one.ids)
        held, to_come, begun = [one.ids for one in entries], list[Ids](), list[Generation]()
        for one in prompts:
            ids = one.request.prompt[:-1]  # the last one is fed, for logits
            if not one.prefilled_tokens:
                shared, place = longest_prefix(ids, held)
                if longest_prefix(ids, to_come)[0] >= max(LEAST_SHARED, shared + 1):
                    continue
                if shared >= LEAST_SHARED:
                    self._use(entries[place])
                    one.begin_like(entries[place].branch, shared)
            insort(to_come, one.request.prompt)
            begun.append(one)
        return begun

    def keep(self, beginning: PrefixEntry) -> None:
        """Take over the last branch of a request, to be kept or closed.

        What begins it is not kept twice.
        """
        tokens = len(beginning.ids)
        for one in list(self._kept):
            shared = common_prefix_len(one.ids, beginning.ids)
            if shared == tokens:
                self._use(one)
                self._engine.close(beginning.branch)
                return
            if shared == len(one.ids):
                self._drop(one)
        self._engine.shrink(beginning.branch, tokens)
        self._kept.append(beginning)
        most = self._engine.max_slots
        while len(self._kept) > MOST_KEPT or (most is not None and self.cells > most // KEPT_SHARE):
            self.drop_oldest()

    def make_room(self, demand: ResourceRequest) -> None:
        """Drop prefixes until requests that need `demand` together fit."""
        cells, branches = self._engine.max_slots, self._engine.max_branches
        while self._kept and (
            (cells is not None and self.cells + demand.cells > cells)
            or (branches is not None and len(self._kept) + demand.branches > branches)
        ):
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the least recently used prefix; return whether there was one."""
        if self._kept:
            self._drop(self._kept[0])
            return True
        return False

    def close(self) -> None:
        while self.drop_oldest():
            pass

    def _use(self, beginning: PrefixEntry) -> None:
        """Mark an entry as just used, if it is kept and not a running answer's."""
        if beginning in self._kept:
            self._kept.remove(beginning)
            self._kept.append(beginning)

    def _drop(self, beginning: PrefixEntry) -> None:
        self._kept.remove(beginning)
        self._engine.close(beginning.branch)


MAX_SHARE = 0.6
"""Of the time of steps in which threads write, on average, this much is for prompt tokens."""
LEAST_TOKENS = 4
"""Fewer are not fed in a step of threads, while there are more: a pass for them would not pay."""
LEAST_SHARE = 24
"""However many threads write, 1 / LEAST_SHARE of a step's most tokens may be of prompts."""
DEBT_STEPS = 8
"""At most this many steps pay for one slow pass, which may never come again."""
MOST_STEPS = 16
"""After this many steps without prompt tokens some are fed, whatever they cost."""


@dataclass(slots=True)
class PrefillBudget:
    """How many prompt tokens go into each step; it learns from what steps take.

    most_tokens: of a step, those of threads included.
    """

    most_tokens: int = BATCH_TOKENS
    _costs: StepCost = field(default_factory=StepCost)
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _budget_s: float = 0.0
    _tokens: deque[int] = field(default_factory=lambda: deque((LEAST_TOKENS,), maxlen=5))
    _steps_without: int = 0

    def __post_init__(self) -> None:
        assert self.most_tokens > 0, "a prompt is fed by at least a token a step"

    def tokens(self, width: int) -> int:
        """Return how many prompt tokens go into a step of `width` threads. Call it once a step."""
        if not width:
            return self.most_tokens
        if self._costs.unsure([width]) is not None:
            return 0  # this very step tells what threads take alone
        share_s = MAX_SHARE / (1 - MAX_SHARE) * (self._costs.seconds(width) or 0.0)
        token_s = median(self._token_s) if self._token_s else 0.0
        most_s = share_s + LEAST_TOKENS * token_s
        self._budget_s = max(-DEBT_STEPS * share_s, min(self._budget_s + share_s, most_s))
        if self._budget_s < LEAST_TOKENS * token_s:
            return LEAST_TOKENS if self._steps_without >= MOST_STEPS else 0
        least = max(LEAST_TOKENS, self.most_tokens // LEAST_SHARE)
        wanted = min(max(least, self.most_tokens - width), 2 * max(self._tokens))
        return wanted if wanted * token_s <= self._budget_s else int(self._budget_s / token_s)

    def learn(self, width: int, prompt_tokens: int, seconds: float) -> None:
        """Hear what a step of `width` threads and some prompt tokens took."""
        self._steps_without = 0 if prompt_tokens else self._steps_without + 1
        if not prompt_tokens:
            self._costs.add(width, seconds)
            return
        more_s = max(0.0, seconds - (self._costs.seconds(width) or 0.0)) if width else seconds
        self._token_s.append(more_s / prompt_tokens)
        if width:
            self._budget_s -= more_s
            self._tokens.append(max(LEAST_TOKENS, prompt_tokens))


def share_out(wanted: Sequence[int], tokens: int) -> list[int]:
    """Return how many of `tokens` each prompt gets that still needs `wanted`, the oldest first.

    The shortest first, so that nobody waits for a long one; but the oldest has half of them.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    left = tokens
    if order and order[0] != 0:
        shares[0] = min(wanted[0], -(-tokens // 2))
        left -= shares[0]
    for place in order:
        more = min(wanted[place] - shares[place], left)
        shares[place] += more
        left -= more
    return shares
