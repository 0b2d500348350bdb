"""How far an answer may go, and what a thread may write next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pasta_decoding.runtime.vocabulary import Ids


@dataclass(frozen=True, slots=True)
class Rules:
    """How far one answer may go.

    max_tokens:       tokens behind the prompt, tags included: the first so many in reading order.
    max_threads:      threads that write at a time, the main one included. It says when they
                      write, never what: a promise beyond it waits.
    max_chunks:       chunks of the whole answer.
    chunk_factor:     a chunk may be this many times as long as promised,
    min_chunk_tokens: but may always have this many tokens.
    max_topic_tokens: tokens of one topic; then its closing is forced.
    topics_begin_apart: no topic begins with the first token of an earlier one. Small models drift
                      from one topic to its variations; large ones may do without.
    parallel:         False bans promises and syncs: sequential decoding with the same weights.
    topic:            False for checkpoints whose promises carry none.
    """

    max_tokens: int = 1024
    max_threads: int = 32
    max_chunks: int = 64
    chunk_factor: float = 3.0
    min_chunk_tokens: int = 40
    max_topic_tokens: int = 12
    topics_begin_apart: bool = True
    parallel: bool = True
    topic: bool = True


@dataclass(frozen=True, slots=True)
class Constraint:
    """Which ids a thread may write next: those not in `banned`, or only those in `only`.

    banned: what is forbidden just here stands behind what is in many places.
    instead: where the model wants a banned token, it chooses among these; None: among the rest.
    forced: the choice is not the model's (a limit ended something), so it is no intervention.
    """

    banned: Ids
    only: Ids | None = None
    instead: Ids | None = None
    forced: bool = False

    def admits(self, token: int) -> bool:
        """May `token` stand here?"""
        if self.only is not None:
            return bool(np.any(self.only == token))
        return not np.any(self.banned == token)

    @classmethod
    def force(cls, ids: Sequence[int]) -> Constraint:
        """Allow only `ids`: a limit leaves no other choice."""
        return cls(NOTHING, only=np.array(ids), forced=True)


NOTHING: Ids = np.array([], dtype=np.int64)
