"""Constraints on the next token of a thread, and the token budget of an answer.

There are constraints for the main thread, for a chunk and for a topic. They keep every answer well
formed, whatever the model prefers.
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
"""The most tokens that one choice adds: PROMISE_CLOSE also adds ASYNC_OPEN."""
NO_IDS: IdArray = np.array([], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Constraint:
    """The ids that a thread may write next: those not in `banned`, or only those in `only`.

    substitutes: if the model prefers a banned token, it must choose among these; None: among all
                 that are not banned.
    forced:      a limit leaves no choice, so overruling the model counts as no intervention.
    bias:        added to the logits of these ids before the model's choice.
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
        """The ids to choose from if the model prefers a forbidden one; None: all but `banned`."""
        return self.substitutes if self.only is None else self.only

    def candidates(self, size: int) -> npt.NDArray[np.bool_]:
        """Return `alternatives` as a mask over a vocabulary of `size` ids."""
        if self.alternatives is None:
            candidates_V = np.ones(size, dtype=np.bool_)
            candidates_V[self.banned] = False
        else:
            candidates_V = np.zeros(size, dtype=np.bool_)
            candidates_V[self.alternatives] = True
        return candidates_V

    def best(self, score_V: npt.NDArray[Any]) -> int:
        """Return the allowed id with the largest score, and of equal ones the smallest.

        If no score is above -inf, that is the first allowed id.
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
    vocabulary: Vocabulary,
    *,
    promise: bool,
    sync: bool,
    eagerness: float = 0.0,
    sync_bias: float = 0.0,
) -> Constraint:
    """Return the constraint of main outside topics, given whether it may promise and may sync."""
    control = vocabulary.control
    allowed_tags: list[int] = []
    bias: dict[int, float] = {}
    if promise:
        allowed_tags.append(control.promise_open)
        if eagerness:
            bias[control.promise_open] = eagerness
    if sync:
        allowed_tags.append(control.sync)
        if sync_bias:
            bias[control.sync] = sync_bias
    return Constraint(vocabulary.control_except(allowed_tags), bias=bias)


def open_chunk_constraint(vocabulary: Vocabulary, *, has_text: bool) -> Constraint:
    """Return the constraint of a chunk within its limits, given whether it has text yet."""
    if not has_text:
        return Constraint(vocabulary.not_chunk_start)
    return Constraint(vocabulary.control_except({vocabulary.control.async_close}))


@dataclass(slots=True)
class Topics:
    """The topic that main is writing, as `ids`, and the topics of the promises before it.

    No topic repeats an earlier one. A topic that equals an earlier one may grow; if it has no room
    to grow, the token that would make it equal is banned.

    earlier:    the finished topics, folded by `fold_topic`.
    beginnings: their first tokens.
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
        """Return the constraint on the next token of the topic, or on its PROMISE_CLOSE."""
        closes = self.vocabulary.promise_close_ids
        if not self.rules.topic:
            return Constraint(NO_IDS, only=closes)
        topic = self.vocabulary.decode(self.ids)
        fresh = self._is_fresh(topic)
        if self.is_full and fresh:
            return Constraint(NO_IDS, only=closes)
        banned = [self.vocabulary.not_in_topic]
        substitutes = None
        if not fresh:
            banned.append(closes)
        if len(topic.split()) >= MAX_TOPIC_WORDS:
            banned.append(self.vocabulary.starts_word)
            substitutes = closes if fresh else None  # a fourth word ends the topic
        stale = [self._stale_endings(topic)]
        if not self.ids:
            stale.append(np.array(sorted(self.beginnings), dtype=np.int64))
        all_banned = np.concatenate([*banned, *stale])
        size = len(self.vocabulary.texts)
        # Ids may repeat, but `np.unique` sorts them, which is slow.
        if len(all_banned) < size or len(np.unique(all_banned)) < size:
            return Constraint(all_banned, substitutes=substitutes)
        # All tokens of a tiny vocabulary may be banned; then the topic may repeat an earlier one.
        return Constraint(np.concatenate(banned), substitutes=substitutes)

    def _stale_endings(self, topic: str) -> IdArray:
        """Return the tokens that would make the topic equal an earlier one without room to grow.

        There is no room if no further word is allowed, or no further token.
        """
        is_last_token = len(self.ids) == self.rules.max_topic_tokens - 1
        folded = fold_topic(topic)
        endings = []
        for earlier in self.earlier:
            has_room = not is_last_token and len(earlier.split()) < MAX_TOPIC_WORDS
            if earlier.startswith(folded) and not has_room:
                endings.append(earlier[len(folded) :].strip())
        repeating = self.vocabulary.ids_of_words(endings)
        if is_last_token:
            return np.union1d(repeating, self.vocabulary.not_topic_end)
        return repeating

    def _is_fresh(self, topic: str) -> bool:
        """Could the topic end here? It ends in a whole character and equals no earlier topic."""
        folded = fold_topic(topic)
        ends_in_character = folded[-1:] not in ("", FRAGMENT)
        return ends_in_character and folded not in self.earlier


@dataclass(slots=True)
class WrittenChunk:
    """One chunk of an answer that is being written.

    first_position: position of its ASYNC_OPEN.
    promised:       its promised length, in tokens.
    main_tokens:    tokens of main before it in reading order.
    segment:        its index among the answer's segments.
    """

    thread: int
    first_position: int
    promised: int
    main_tokens: int
    segment: int
    ids: list[int]
    running: bool = True

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.ids))


@dataclass(slots=True)
class Budget:
    """The tokens of one answer, tags included, against the limits of `rules`.

    written_tokens: tokens of all threads, including those that will be trimmed.
    chunks:         all chunks so far; `chunks[k - 1]` belongs to thread k.
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
        """Return the number of tokens up to the last one of `thread`, in reading order.

        It counts tokens written so far, so it grows when a thread before `thread` writes.
        """
        if thread == MAIN:
            return self.written_tokens
        main_tokens = self.chunks[thread - 1].main_tokens
        return main_tokens + sum(len(chunk.ids) for chunk in self.chunks[:thread])

    def remaining_tokens(self, thread: int) -> int:
        """Return the most tokens that `thread` can write until a limit ends it, at least 1."""
        remaining_tokens = self.rules.max_tokens - self.tokens_up_to(thread)
        if thread != MAIN:
            chunk = self.chunks[thread - 1]
            remaining_tokens = min(remaining_tokens, self._remaining_chunk_tokens(chunk))
        return max(1, remaining_tokens)

    def runnable(
        self, order: Sequence[int], ahead_tokens: int, longest_promise: int = 0
    ) -> Sequence[int]:
        """Return the threads of `order` that may write next, always at least the first.

        The budget trims an answer in reading order, so the tokens of later threads may be in vain.
        Later threads wait if more than `ahead_tokens` could be.

        order:           threads that have a token to be fed, in reading order.
        longest_promise: the longest promise that main may make next; 0 if it is in no topic.
        """
        future_tokens = sum(map(self._remaining_chunk_tokens, self.running))
        if MAIN in order[1:]:
            future_tokens += MAX_CHOICE_TOKENS
            if longest_promise:
                future_tokens += self.max_chunk_tokens(longest_promise)
        # No thread waits if all running chunks can reach their own limits.
        room = self.rules.max_tokens + ahead_tokens - self.written_tokens
        if len(order) > 1 and future_tokens > room:
            ahead = self.written_tokens - self.tokens_up_to(order[0])
            order = order[: 1 + max(0, (ahead_tokens - ahead) // MAX_CHOICE_TOKENS)]
        return order[: self.rules.max_threads]

    def max_chunk_tokens(self, promised: int) -> int:
        """Return the most tokens of a chunk with this promised length, without ASYNC_OPEN."""
        return max(self.rules.min_chunk_tokens, int(promised * self.rules.chunk_factor))

    def ends(self, chunk: WrittenChunk) -> bool:
        """Does the limit of `chunk` or of the answer allow it no further token?"""
        past_budget = self.is_used_up and self.tokens_up_to(chunk.thread) >= self.rules.max_tokens
        return past_budget or self._remaining_chunk_tokens(chunk) <= 0

    def _remaining_chunk_tokens(self, chunk: WrittenChunk) -> int:
        return self.max_chunk_tokens(chunk.promised) + 1 - len(chunk.ids)
