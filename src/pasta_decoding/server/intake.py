"""What comes before any engine: questions become requests, and only so many are taken in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.request import Request
from pasta_decoding.server.backend import Ask, BusyError, Load

FIRST_GUESS_S = 5.0
"""What an answer is taken to last before one has been seen."""
MAX_RETRY_S = 60


@dataclass(slots=True)
class Intake:
    """All of it belongs to the event loop's thread.

    max_tokens: of prompt and answer together.
    max_concurrency:    answers that are written together,
    queue:      and how many more may wait.
    """

    decoder: Decoder
    max_tokens: int
    max_concurrency: int
    queue: int
    _unended: int = 0
    _typical_s: float = FIRST_GUESS_S

    @property
    def load(self) -> Load:
        """How much there is to do now."""
        running = min(self._unended, self.max_concurrency)
        return Load(running, self._unended - running)

    def chat_prompt(self, messages: Sequence[Message], answer_tokens: int) -> tuple[int, ...]:
        """Encode a conversation; PastaError if it leaves no room for `answer_tokens` more."""
        room = self._room_beside(answer_tokens)
        return tuple(self.decoder.encoder.encode(messages, max_tokens=room))

    def text_prompt(self, text: str, answer_tokens: int) -> tuple[int, ...]:
        """Encode a text to go on from, without the chat template; errors as above."""
        room = self._room_beside(answer_tokens)
        return tuple(self.decoder.encoder.encode_plain(text, max_tokens=room))

    def plain_tokens(self, text: str) -> int:
        """Count the tokens of a text without tags."""
        return self.decoder.plain_tokens(text)

    def request(self, ask: Ask) -> Request:
        """Return what the runtime is asked."""
        sampler = self.decoder.sampler(ask.prompt, ask.sampling, ask.choice)
        return self.decoder.request_of(ask.prompt, ask.rules, sampler)

    def check_room(self, answers: int) -> None:
        """Raise BusyError if there is no room for all answers of a request.

        PastaError if there never will be.
        """
        most = self.max_concurrency + self.queue
        if answers > most:
            raise PastaError(
                f"these are {answers} answers, and this server takes {most} at a time",
                hint="Ask for fewer choices or prompts.",
                field="n",
            )
        if self._unended + answers > most:
            raise BusyError(self._retry_after_s())

    def enter(self, answers: int) -> None:
        """Take a request's answers in; errors as above."""
        self.check_room(answers)
        self._unended += answers

    def leave(self) -> None:
        """Give up the place of an answer, whatever became of it."""
        self._unended -= 1

    def note(self, answer: Answer) -> None:
        """Learn what answers last, once they are let in."""
        self._typical_s += 0.2 * (answer.seconds - answer.queue_s - self._typical_s)

    def _room_beside(self, answer_tokens: int) -> int:
        room = self.max_tokens - answer_tokens
        if room < 1:
            raise PastaError(
                f"an answer of up to {answer_tokens} tokens leaves no room for a prompt: the model "
                f"holds {self.max_tokens} of both",
                hint="Ask for fewer tokens.",
                code=TOO_LONG,
                field="max_tokens",
            )
        return room

    def _retry_after_s(self) -> int:
        """Guess when the first of the queue will have been let in."""
        turns = self._unended / self.max_concurrency
        return min(MAX_RETRY_S, max(1, math.ceil(self._typical_s * turns)))
