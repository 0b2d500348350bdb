"""How far an answer may go. Settings take their defaults from here, so it loads at once."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_decoding.errors import PastaError

MAX_EAGERNESS = 100


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
    eagerness:        added to the promise's logit where main may promise; None: the checkpoint's.
    """

    max_tokens: int = 512
    max_threads: int = 32
    max_chunks: int = 64
    chunk_factor: float = 3.0
    min_chunk_tokens: int = 40
    max_topic_tokens: int = 12
    topics_begin_apart: bool = True
    parallel: bool = True
    topic: bool = True
    eagerness: float | None = None

    def __post_init__(self) -> None:
        if self.eagerness is not None and not abs(self.eagerness) <= MAX_EAGERNESS:
            raise PastaError(
                f"eagerness {self.eagerness} is not between {-MAX_EAGERNESS} and {MAX_EAGERNESS}"
            )
