"""Settings of one answer: its limits, its sampling and its priority.

The commands take their defaults from here, so this module imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0: logits divided by it could overflow a float32."""


class Priority(IntEnum):
    """Priority over other answers: `high` gets all its threads, `low` waits longest."""

    low = -1
    normal = 0
    high = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of one answer.

    max_tokens:       tokens after the prompt, tags included: the first ones in reading order.
    max_threads:      threads that write at a time, main included. Further threads wait; the text
                      of the answer does not depend on it.
    max_chunks:       chunks of the answer.
    chunk_factor:     a chunk may be this many times as long as promised.
    min_chunk_tokens: a chunk may always have this many tokens.
    max_topic_tokens: tokens of one topic; after them PROMISE_CLOSE is forced.
    parallel:         False bans promises and syncs: sequential decoding with the same weights.
    topic:            False for checkpoints whose promises have no topic.
    eagerness:        added to the logit of PROMISE_OPEN; None: the checkpoint's value.
    sync_bias:        added to the logit of SYNC. It is always the checkpoint's: no user sets it.
    stop:             the first of these strings to be complete, in reading order, ends the answer.
    max_seconds:      wall-clock limit, time in the queue included.
    """

    max_tokens: int = 512
    max_threads: int = 32
    max_chunks: int = 64
    chunk_factor: float = 3.0
    min_chunk_tokens: int = 40
    max_topic_tokens: int = 12
    parallel: bool = True
    topic: bool = True
    eagerness: float | None = None
    sync_bias: float = 0.0
    stop: tuple[str, ...] = ()
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; the other defaults change nothing.

    `GenerationConfig` and the training configuration check the ranges. Penalties are vLLM's.

    top_k:      only the tokens with this many largest logits.
    min_p:      only tokens with at least this many times the likeliest token's probability.
    top_p:      of the tokens that `top_k` and `min_p` leave, the fewest that hold this share of
                their probability. Ties at a cut stay in.
    logit_bias: added to the logits of these ids. It allows no id that the grammar forbids.
    logprobs:   alternatives to report for each token; None: no log probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)
