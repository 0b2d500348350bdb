"""What every method needs to ask a question: a way to decode requests, and the sampling of each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.scheduling.asking import DecodingTask

Ask = Callable[[Sequence[Request]], DecodingTask[list[Answer]]]
"""Decodes requests side by side. A beginning that their prompts share is computed once."""


def question_sampling(
    config: GenerationConfig, question: Question, point: int = 0
) -> SamplingParams:
    """Return the sampling of one request.

    The seed is made of the config's seed, the question and the point of its skeleton. So an answer
    does not depend on the order in which questions are asked.
    """
    seed_text = f"{config.seed} {question.id} {point}".encode()
    seed = int.from_bytes(sha256(seed_text).digest()[:4], "big")
    return replace(config.sampling(), seed=seed)
