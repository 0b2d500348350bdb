"""From what clients ask to what the runtime is asked, before any engine comes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.governor import Priority
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to be written: a choice of a request.

    choice: its index among the request's; tells answers with the same seed apart.
    stops:  the text ends before the first of these, in reading order.
    priority: how it stands to others that are written at the same time.
    """

    prompt: tuple[int, ...]
    rules: Rules
    sampling: Sampling
    choice: int = 0
    stops: tuple[str, ...] = ()
    priority: Priority = Priority.normal


@dataclass(frozen=True, slots=True)
class Questions:
    """Turns questions into requests. `max_tokens`: of prompt and answer together."""

    decoder: Decoder
    max_tokens: int

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
        return self.decoder.request_of(
            ask.prompt, ask.rules, sampler, stops=ask.stops, priority=ask.priority
        )

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
