"""The prefix cache: a prompt begins with keys that earlier prompts have computed.

The next turn of a conversation begins with the prompt of the last one, and many prompts begin with
the same system prompt. So the cache keeps prefixes of ended answers. They use only free room: when
a request needs that room, the least recently used prefixes go.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from pasta_decoding.engines.base import Engine
from pasta_decoding.scheduling.admission import ResourceRequest, has_room
from pasta_decoding.scheduling.generation import FedPrefix, Generation

MIN_SHARED_TOKENS = 16
"""A shorter prefix is computed faster than it is copied."""
MAX_PREFIXES = 32
"""Each prefix in the cache takes a branch of the engine."""
MAX_SLOT_SHARE = 1 / 2
"""All prefixes in the cache take at most this share of the engine's slots."""


@dataclass(eq=False)
class PrefixCache:
    """Prefixes of ended answers, the least recently used one first.

    The cache owns their branches: each is the only branch of a shrunk request of the engine.
    """

    _engine: Engine
    _prefixes: list[FedPrefix] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return sum(len(prefix.ids) for prefix in self._prefixes)

    def begin(
        self, prefilling: Sequence[Generation], running: Sequence[Generation]
    ) -> list[Generation]:
        """Start prompts from the longest known prefixes; return the prompts to feed in this step.

        A prompt is left out if it shares a longer prefix with a prompt before it than with any
        prefix that is known now: it waits until that prompt is computed.

        prefilling: the answers whose prompts are not fed to the end.
        running:    all open answers; their prompts are prefixes as well.
        """
        if all(generation.prefilled_tokens for generation in prefilling):
            return list(prefilling)
        prefixes = [*self._prefixes]
        prefixes += [other.fed_prompt for other in running if other.prefilled_tokens]
        prefixes.sort(key=lambda prefix: prefix.ids)
        prefix_ids = [prefix.ids for prefix in prefixes]
        earlier_prompts: list[tuple[int, ...]] = []  # sorted
        ready = []
        for generation in prefilling:
            prompt = generation.request.prompt
            if not generation.prefilled_tokens:
                copyable = prompt[:-1]  # the last token is always fed, for its logits
                shared_tokens, index = longest_prefix(copyable, prefix_ids)
                soon_shared_tokens, _ = longest_prefix(copyable, earlier_prompts)
                if soon_shared_tokens >= max(MIN_SHARED_TOKENS, shared_tokens + 1):
                    continue
                if shared_tokens >= MIN_SHARED_TOKENS:
                    self._mark_used(prefixes[index])
                    generation.copy_prefix(prefixes[index].branch, shared_tokens)
            insort(earlier_prompts, prompt)
            ready.append(generation)
        return ready

    def keep_prefix_of(self, generation: Generation) -> None:
        """Take over the prefix of a finished answer that still has its branches, if it is long."""
        prefix = generation.release_prefix(MIN_SHARED_TOKENS)
        if prefix is not None:
            self.keep(prefix)

    def keep(self, prefix: FedPrefix) -> None:
        """Take over `prefix` and its branch. If the cache has those tokens, close the branch."""
        for other in list(self._prefixes):
            shared_tokens = common_prefix_len(other.ids, prefix.ids)
            if shared_tokens == len(prefix.ids):
                self._mark_used(other)
                self._engine.close(prefix.branch)
                return
            if shared_tokens == len(other.ids):
                self._drop(other)
        self._prefixes.append(prefix)
        while self._is_too_large():
            self.drop_oldest()

    def make_room(self, needed: ResourceRequest) -> None:
        """Drop prefixes until all answers, which need `needed` together, have room."""
        while self._prefixes:
            resources = ResourceRequest(self.slots, branches=len(self._prefixes))
            if has_room(self._engine, needed + resources):
                return
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the least recently used prefix. Return False if the cache is empty."""
        if not self._prefixes:
            return False
        self._drop(self._prefixes[0])
        return True

    def close(self) -> None:
        while self.drop_oldest():
            pass

    def _is_too_large(self) -> bool:
        if len(self._prefixes) > MAX_PREFIXES:
            return True
        max_slots = self._engine.max_slots
        return max_slots is not None and self.slots > MAX_SLOT_SHARE * max_slots

    def _mark_used(self, prefix: FedPrefix) -> None:
        """Make `prefix` the most recently used one; nothing if it is that of a running answer."""
        if prefix in self._prefixes:
            self._prefixes.remove(prefix)
            self._prefixes.append(prefix)

    def _drop(self, prefix: FedPrefix) -> None:
        self._prefixes.remove(prefix)
        self._engine.close(prefix.branch)


def longest_prefix(ids: tuple[int, ...], ordered: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return how many tokens `ids` shares with its best match in `ordered`, and that one's index.

    `ordered` is sorted, so the best match is a neighbour of the place where `ids` would stand.
    """
    insertion_index = bisect_left(ordered, ids)
    best = (0, 0)
    for index in (insertion_index - 1, insertion_index):
        if 0 <= index < len(ordered):
            best = max(best, (common_prefix_len(ordered[index], ids), index))
    return best


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the equal tokens at the start of both, by bisection over slices."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
