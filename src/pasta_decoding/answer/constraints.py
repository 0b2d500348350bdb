"""Which ids may stand next, and how far each thread may still go.

Constraints for the main thread, for a chunk, and for a topic: whatever the model wants, the answer
is well formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.vocabulary import FRAGMENT, IdArray, Vocabulary, fold_topic
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.tree import MAX_TOPIC_WORDS, valid_topic

MAX_CHOICE_TOKENS = 2
"""Tokens that one choice adds at most: PROMISE_CLOSE, and ASYNC_OPEN with it."""
NO_IDS: IdArray = np.array([], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Constraint:
    """Which ids a thread may write next: those not in `banned`, or only those in `only`.

    banned: what is forbidden just here stands behind what is in many places.
    substitutes: where the model wants a banned token, it chooses among these; None: among the rest.
    forced: the choice is not the model's (a limit ended something), so it is no intervention.
    bias: added to the logits of some ids first, as if the model had wanted it so.
    """

    banned: IdArray
    only: IdArray | None = None
    substitutes: IdArray | None = None
    forced: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)

    def admits(self, token: int) -> bool:
        return token not in self.banned if self.only is None else token in self.only

    @property
    def alternatives(self) -> IdArray | None:
        """The ids of which one is taken where the model wants another; None: all but the banned."""
        return self.substitutes if self.only is None else self.only

    def candidates(self, size: int) -> npt.NDArray[np.bool_]:
        named = self.alternatives
        candidates_V = np.full(size, named is None)
        candidates_V[self.banned if named is None else named] = named is not None
        return candidates_V

    def best(self, score_V: npt.NDArray[Any]) -> int:
        """Return the allowed id with the largest score: the smallest one of equals.

        Where no score is above -inf, the first allowed id.
        """
        top = int(score_V.argmax())
        if self.admits(top) and score_V[top] > -np.inf:
            return top
        ids = np.flatnonzero(self.candidates(len(score_V)))
        scores = score_V[ids]
        return int(ids[np.where(np.isnan(scores), -np.inf, scores).argmax()])

    @classmethod
    def force(cls, ids: Sequence[int]) -> Constraint:
        """Allow only `ids`: a limit leaves no other choice."""
        return cls(NO_IDS, only=np.array(ids), forced=True)


def main_constraint(
    vocabulary: Vocabulary, *, promise: bool, sync: bool, eagerness: float = 0.0
) -> Constraint:
    """Return what main may write outside topics, given whether it may promise and may sync."""
    control = vocabulary.control
    allowed_tags: list[int] = []
    bias: dict[int, float] = {}
    if promise:
        allowed_tags.append(control.promise_open)
        if eagerness:
            bias[control.promise_open] = eagerness
    if sync:
        allowed_tags.append(control.sync)
    return Constraint(vocabulary.control_except(allowed_tags), bias=bias)


def open_chunk_constraint(vocabulary: Vocabulary, *, has_text: bool) -> Constraint:
    """Return what a chunk may write that no limit ends, given whether it has text yet."""
    if not has_text:
        return Constraint(vocabulary.not_chunk_start)
    return Constraint(vocabulary.control_except({vocabulary.control.async_close}))


@dataclass(slots=True)
class Topics:
    """The topic that main is writing, as `ids`, and those of the promises before it.

    No topic repeats an earlier one, and each can end: where a repetition could no longer be grown
    out of, the token that would complete it is banned.

    earlier: the finished ones, as `fold_topic` has them; `beginnings`: their first tokens.
    """

    vocabulary: Vocabulary
    rules: Rules
    ids: list[int] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    beginnings: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return len(self.ids) >= self.rules.max_topic_tokens

    def finish(self) -> str:
        """End the topic being written and return it; "" if it has no valid text."""
        topic = valid_topic(self.vocabulary.decode(self.ids)) or ""
        self.earlier.append(fold_topic(topic))
        self.beginnings.update(self.ids[:1])
        self.ids = []
        return topic

    def constraint(self) -> Constraint:
        closes = self.vocabulary.promise_close_ids
        if not self.rules.topic:
            return Constraint(NO_IDS, only=closes)
        topic = self.vocabulary.decode(self.ids)
        fresh = self._is_fresh(topic)
        if self.is_full and fresh:
            return Constraint(NO_IDS, only=closes)
        banned = [self.vocabulary.not_in_topic]
        instead = None
        if not fresh:
            banned.append(closes)
        if len(topic.split()) >= MAX_TOPIC_WORDS:
            banned.append(self.vocabulary.starts_word)
            instead = closes if fresh else None  # a fourth word ends the topic
        stale = [self._stale_endings(topic)]
        if not self.ids:
            stale.append(np.array(sorted(self.beginnings), dtype=np.int64))
        # A tiny vocabulary may have nothing fresh left: then the topic repeats, or grows.
        all_banned = np.concatenate([*banned, *stale])
        size = len(self.vocabulary.texts)
        if len(all_banned) < size or len(np.unique(all_banned)) < size:
            return Constraint(all_banned, substitutes=instead)
        return Constraint(np.concatenate(banned), substitutes=instead)

    def _stale_endings(self, topic: str) -> IdArray:
        """Return the tokens that would complete a repetition with no room to grow out of it.

        No room: no further word is allowed, or no further token.
        """
        last = len(self.ids) == self.rules.max_topic_tokens - 1
        folded = fold_topic(topic)
        rests = [
            earlier[len(folded) :].strip()
            for earlier in self.earlier
            if earlier.startswith(folded) and (last or len(earlier.split()) >= MAX_TOPIC_WORDS)
        ]
        repeating = self.vocabulary.ids_of_words(rests)
        return np.union1d(repeating, self.vocabulary.not_topic_end) if last else repeating

    def _is_fresh(self, topic: str) -> bool:
        folded = fold_topic(topic)
        ends_in_character = folded[-1:] not in ("", FRAGMENT)
        return ends_in_character and folded not in self.earlier


@dataclass(slots=True)
class WrittenChunk:
    """One chunk.

    first:       position of its ASYNC_OPEN.
    main_tokens: those of main that stand before it in reading order.
    segment:     its place among the answer's segments.
    """

    thread: int
    first: int
    promised: int
    main_tokens: int
    segment: int
    ids: list[int]
    running: bool = True

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.ids))


@dataclass(slots=True)
class Budget:
    """What one answer has used of `rules`. All counts are tokens, tags included.

    written_tokens: of all threads, those included that will be trimmed.
    chunks:         all that have begun; the k-th thread writes the k-th.
    """

    rules: Rules
    written_tokens: int = 0
    chunks: list[WrittenChunk] = field(default_factory=list)

    @property
    def running(self) -> list[WrittenChunk]:
        return [chunk for chunk in self.chunks if chunk.running]

    @property
    def is_used_up(self) -> bool:
        return self.written_tokens >= self.rules.max_tokens

    def tokens_up_to(self, thread: int) -> int:
        """Return how many tokens stand up to the last one of `thread`, in reading order.

        Those that have been written, that is: the number grows with the threads before it.
        """
        if thread == MAIN:
            return self.written_tokens
        before = self.chunks[thread - 1].main_tokens
        return before + sum(len(chunk.ids) for chunk in self.chunks[:thread])

    def remaining_tokens(self, thread: int) -> int:
        """Return how many tokens `thread` can write at most until a limit ends it; at least one."""
        remaining_tokens = self.rules.max_tokens - self.tokens_up_to(thread)
        if thread != MAIN:
            chunk = self.chunks[thread - 1]
            remaining_tokens = min(remaining_tokens, self._remaining_chunk_tokens(chunk))
        return max(1, remaining_tokens)

    def runnable(self, order: Sequence[int], ahead_tokens: int, longest: int = 0) -> Sequence[int]:
        """Return which threads of `order` can write next: the first always does.

        order:        threads that have a token to be fed, in reading order.
        ahead_tokens: tokens that the answer may be ahead of what is kept of it.
        longest:      the longest promise that main may make next; 0 if it is in no topic.
        """
        coming = sum(map(self._remaining_chunk_tokens, self.running))
        if MAIN in order[1:]:
            coming += MAX_CHOICE_TOKENS + (self.most_of_a_chunk(longest) if longest else 0)
        # Is there less room than all that has begun needs to come to its own limits?
        if len(order) > 1 and self.written_tokens + coming > self.rules.max_tokens + ahead_tokens:
            ahead = self.written_tokens - self.tokens_up_to(order[0])
            order = order[: 1 + max(0, (ahead_tokens - ahead) // MAX_CHOICE_TOKENS)]
        return order[: self.rules.max_threads]

    def most_of_a_chunk(self, promised: int) -> int:
        """Return how many tokens may keep a promise of this many, ASYNC_OPEN not counted."""
        return max(self.rules.min_chunk_tokens, int(promised * self.rules.chunk_factor))

    def ends(self, chunk: WrittenChunk) -> bool:
        """Does a limit, its own or the answer's, leave `chunk` no further token?"""
        beyond = self.is_used_up and self.tokens_up_to(chunk.thread) >= self.rules.max_tokens
        return beyond or self._remaining_chunk_tokens(chunk) <= 0

    def _remaining_chunk_tokens(self, chunk: WrittenChunk) -> int:
        return self.most_of_a_chunk(chunk.promised) + 1 - len(chunk.ids)
