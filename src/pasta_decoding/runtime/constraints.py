"""Which ids may stand next: in the main thread, in a chunk, and in a topic.

So whatever the model wants, the answer is well formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pasta_decoding.lang.tree import MAX_TOPIC_WORDS, valid_topic
from pasta_decoding.runtime.budget import Budget, WrittenChunk
from pasta_decoding.runtime.request import Rules
from pasta_decoding.runtime.vocabulary import FRAGMENT, Ids, Vocabulary, fold_topic

NOTHING: Ids = np.array([], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Which ids a thread may write next: those not in `banned`, or only those in `only`.

    banned: what is forbidden just here stands behind what is in many places.
    instead: where the model wants a banned token, it chooses among these; None: among the rest.
    forced: the choice is not the model's (a limit ended something), so it is no intervention.
    bias: added to the logits of some ids first, as if the model had wanted it so.
    """

    banned: Ids
    only: Ids | None = None
    instead: Ids | None = None
    forced: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)

    def admits(self, token: int) -> bool:
        """May `token` stand here?"""
        if self.only is not None:
            return bool(np.any(self.only == token))
        return not np.any(self.banned == token)

    @property
    def alternatives(self) -> Ids | None:
        """The ids of which one is taken where the model wants another; None: all but the banned."""
        return self.instead if self.only is None else self.only

    @classmethod
    def force(cls, ids: Sequence[int]) -> Constraint:
        """Allow only `ids`: a limit leaves no other choice."""
        return cls(NOTHING, only=np.array(ids), forced=True)


def main_constraint(
    vocabulary: Vocabulary, *, promise: bool, sync: bool, eagerness: float = 0.0
) -> Constraint:
    """Return what main may write outside topics, given whether it may promise and may sync."""
    control = vocabulary.control
    banned = set(control.ids)
    if promise:
        banned.remove(control.promise_open)
    if sync:
        banned.remove(control.sync)
    bias = {control.promise_open: eagerness} if promise and eagerness else {}
    return Constraint(np.array(sorted(banned)), bias=bias)


def chunk_constraint(chunk: WrittenChunk, budget: Budget, vocabulary: Vocabulary) -> Constraint:
    """Return what `chunk` may write: at least one token, and its end where a limit says so."""
    begun = len(chunk.ids) > 1
    if begun and budget.ends(chunk):
        return Constraint.force([vocabulary.control.async_close])
    return open_chunk_constraint(vocabulary, begun=begun)


def open_chunk_constraint(vocabulary: Vocabulary, *, begun: bool) -> Constraint:
    """Return what a chunk may write that no limit ends, given whether it has a token of its own."""
    if not begun:
        return Constraint(vocabulary.not_chunk_start)
    control = vocabulary.control
    return Constraint(np.array(sorted(control.ids - {control.async_close})))


@dataclass(slots=True)
class Topics:
    """The topic that main is writing, and those of the promises before it.

    No topic repeats an earlier one, and each can end: where a repetition could no longer be grown
    out of, the token that would complete it is banned.

    ids:     the tokens of the one being written.
    earlier: the finished ones, as `fold_topic` has them.
    beginnings: the first tokens of these.
    """

    vocabulary: Vocabulary
    rules: Rules
    ids: list[int] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    beginnings: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Has it all the tokens that a topic may have, so that its closing is forced?"""
        return len(self.ids) >= self.rules.max_topic_tokens

    def finish(self) -> str:
        """End the topic being written and return it; "" if it has no valid text."""
        topic = valid_topic(self.vocabulary.decode(self.ids)) or ""
        self.earlier.append(fold_topic(topic))
        self.beginnings.update(self.ids[:1])
        self.ids = []
        return topic

    def constraint(self) -> Constraint:
        """Return what may stand next in the topic, its closing included."""
        closes = self.vocabulary.promise_close_ids
        if not self.rules.topic:
            return Constraint(NOTHING, only=closes)
        topic = self.vocabulary.decode(self.ids)
        fresh = self._is_fresh(topic)
        if self.is_full and fresh:
            return Constraint(NOTHING, only=closes)
        banned = [self.vocabulary.not_in_topic]
        instead = None
        if not fresh:
            banned.append(closes)
        if len(topic.split()) >= MAX_TOPIC_WORDS:
            banned.append(self.vocabulary.starts_word)
            instead = closes if fresh else None  # who wants a fourth word has said three
        if not self.ids and self.rules.topics_begin_apart:
            banned.append(self._used_beginnings())
        banned.append(self._stale_endings(topic))
        return Constraint(np.concatenate(banned), instead=instead)

    def _used_beginnings(self) -> Ids:
        """Return the first tokens of the earlier topics; none of them once there is no other."""
        exhausted = len(self.beginnings) >= self.vocabulary.topic_beginnings
        return NOTHING if exhausted else np.array(sorted(self.beginnings), dtype=np.int64)

    def _stale_endings(self, topic: str) -> Ids:
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
        whole = folded[-1:] not in ("", FRAGMENT)
        return whole and folded not in self.earlier
