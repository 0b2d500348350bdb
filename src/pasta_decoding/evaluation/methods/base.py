"""What a method is: how it turns a question into requests, and their answers into a record.

A method is written as a generator. It yields stages and is sent their answers; in the end it
returns what became of the question. It knows no clock and no scheduler, so that the same lines run
alone, for timing, and beside other questions, for throughput.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Protocol, TypeVar

from pasta_decoding.data.questions import Question
from pasta_decoding.evaluation.records import Record
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.request import Request, SamplingParams

Outcome = TypeVar("Outcome")

Stage = Sequence[Request]
"""Requests that are decoded side by side; what their prompts begin with alike is computed once."""

Asking = Generator[Stage, list[Answer], Outcome]
"""One question under way: it yields stages, is sent their answers in order, and returns."""


def of_question(sampling: SamplingParams, question: Question, part: int = 0) -> SamplingParams:
    """Return the sampling of one of a question's requests: its seed follows from their names.

    So an answer is the same whatever else is asked, and in whichever order.
    """
    told = f"{sampling.seed} {question.id} {part}".encode()
    return replace(sampling, seed=int.from_bytes(sha256(told).digest()[:4], "big"))


class Method(Protocol):
    """A way of answering with a model. Its record has no `seconds`: it cannot know the time."""

    @property
    def decoder(self) -> Decoder:
        """The model that it asks."""
        ...

    def ask(self, question: Question) -> Asking[Record]:
        """Answer one question. Raises PastaError if it cannot be asked."""
        ...
