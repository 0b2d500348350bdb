"""How far an answer may go, how its tokens are sampled, and how it stands to other answers.

Settings of the commands take their defaults from here, so this module imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

GREEDY_BELOW = 1e-5
"""A temperature under this is taken as 0: logits divided by it would leave what floats hold."""


class Priority(IntEnum):
    """How an answer stands to the others: `high` gets all its threads, `low` is in no hurry."""

    low = -1
    normal = 0
    high = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """How far one answer may go.

    max_tokens:       tokens behind the prompt, tags included: the first ones in reading order.
    max_threads:      threads that write at a time, the main one included. It says when they
                      write, never what: a promise beyond it waits.
    max_chunks:       chunks of the whole answer.
    chunk_factor:     a chunk may be this many times as long as promised,
    min_chunk_tokens: but may always have this many tokens.
    max_topic_tokens: tokens of one topic; then its closing is forced.
    parallel:         False bans promises and syncs: sequential decoding with the same weights.
    topic:            False for checkpoints whose promises carry none.
    eagerness:        added to the promise's logit where main may promise; None: the checkpoint's.
    stop:             the first of these strings to be complete, in reading order, ends the answer.
    max_seconds:      wall clock, time in the queue included.
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
    stop: tuple[str, ...] = ()
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; the other defaults change nothing.

    `GenerationConfig` and the training configuration check the ranges. Penalties are vLLM's.

    top_p, top_k, min_p: of the tokens with the `top_k` largest logits and at least `min_p` times
        the likeliest's probability, the fewest that hold `top_p` of what these hold together. Ties
        at a border stay in.
    logit_bias: added to the logits of some ids. What may not stand stays out all the same.
    logprobs:   how many alternatives to each token are reported; None: no log probabilities.
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
