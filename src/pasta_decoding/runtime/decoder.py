"""A checkpoint's language on any engine: from a question to a request that answers it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.load import Loaded
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.penalties import History
from pasta_decoding.runtime.request import Priority, Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler, TokenSource
from pasta_decoding.runtime.vocabulary import Vocabulary, vocabulary_of


class RequestScheduler(Protocol):
    """Answers requests together: a `Scheduler` over an engine, or its like over servers.

    Every added request must be forgotten. `Scheduler` documents the methods.
    """

    def add(self, request: Request) -> int: ...
    def step(self) -> None: ...
    def result(self, number: int) -> Answer | None: ...
    def forget(self, number: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Everything that an answer needs except the engine.

    topic:    whether its promises carry one.
    eagerness: added to the promise's logit, of requests that name none.
    parallel: whether the checkpoint knows the language; else all decoding is sequential.
    trained:  whether it was trained for the way in which main comes to see chunks here.
    warning:  see `Loaded`.
    max_model_len: tokens that one request may have; None: what the model and the cache hold.
    """

    encoder: PromptEncoder
    vocabulary: Vocabulary
    topic: bool
    parallel: bool = True
    trained: bool = True
    eagerness: float = 0.0
    warning: str | None = None
    max_model_len: int | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many tokens of one request the model and its cache can hold."""

    @property
    def max_tokens(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self.capacity if self.max_model_len is None else self.max_model_len

    def limited_to(self, max_model_len: int | None) -> Self:
        """Return the same for requests of at most this many tokens."""
        if max_model_len is not None and max_model_len > self.capacity:
            message = f"max_model_len is {max_model_len}, and model and cache hold {self.capacity}"
            raise PastaError(message, field="max_model_len")
        return replace(self, max_model_len=max_model_len)

    @property
    @abstractmethod
    def name(self) -> str:
        """What computes the answers, in one word."""

    @abstractmethod
    def scheduler(self, *, clock: Callable[[], float] = time.perf_counter) -> RequestScheduler:
        """Return what answers requests together. `clock` is for engines in this process."""

    def prompt_ids(self, prompt: str, answer_tokens: int) -> tuple[int, ...]:
        """Encode a user's question; PastaError if it leaves no room for `answer_tokens` more."""
        return self.chat_ids([Message("user", prompt)], answer_tokens)

    def chat_ids(self, messages: Sequence[Message], answer_tokens: int) -> tuple[int, ...]:
        """Encode a conversation; errors as above."""
        room = self._room_beside(answer_tokens)
        return tuple(self.encoder.encode(messages, max_tokens=room))

    def text_ids(self, text: str, answer_tokens: int) -> tuple[int, ...]:
        """Encode a text to go on from, without the chat template; errors as above."""
        room = self._room_beside(answer_tokens)
        return tuple(self.encoder.encode_plain(text, max_tokens=room))

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

    def request(
        self,
        prompt: str,
        rules: Rules,
        sampling: SamplingParams,
        *,
        max_seconds: float | None = None,
    ) -> Request:
        """Return the request that answers `prompt`."""
        ids = self.prompt_ids(prompt, rules.max_tokens)
        return self.request_of(ids, rules, self.sampler(ids, sampling), max_seconds=max_seconds)

    def sampler(self, prompt: Sequence[int], sampling: SamplingParams, choice: int = 0) -> Sampler:
        """Return what chooses the tokens of one answer; `choice` tells those of a request apart.

        Raises PastaError for a bias of ids that the model does not have.
        """
        known = len(self.vocabulary.texts)
        if unknown := [token for token in sampling.logit_bias if not 0 <= token < known]:
            raise PastaError(
                f"logit_bias names the id {unknown[0]}, and the model has those below {known}",
                field="logit_bias",
            )
        if not sampling.penalises:
            return Sampler(sampling, choice)
        control = self.vocabulary.control
        exempt = control.ids | self.vocabulary.eos_ids
        return Sampler(sampling, choice, History(prompt, control, exempt))

    def request_of(
        self,
        ids: tuple[int, ...],
        rules: Rules,
        sampler: TokenSource,
        *,
        max_seconds: float | None = None,
        stops: tuple[str, ...] = (),
        priority: Priority = Priority.normal,
    ) -> Request:
        """Return the request that answers an encoded prompt, as the checkpoint was trained to."""
        if self.max_model_len is not None and len(ids) + rules.max_tokens > self.max_model_len:
            raise PastaError(
                f"{len(ids)} tokens of prompt and {rules.max_tokens} of answer are more than the "
                f"context length of {self.max_model_len}",
                code=TOO_LONG,
                field="max_tokens",
            )
        own = replace(
            rules,
            topic=self.topic,
            parallel=rules.parallel and self.parallel,
            eagerness=self.eagerness if rules.eagerness is None else rules.eagerness,
        )
        return Request(ids, sampler, own, max_seconds, priority, stops)

    def plain_tokens(self, text: str) -> int:
        """Tokens of a tag-free text, tokenised alone."""
        return len(self.encoder.encode_text(text)) if text else 0


def decoder_fields(loaded: Loaded, vocabulary_size: int, joining: Joining) -> dict[str, Any]:
    """Return the fields of a `Decoder` for a loaded checkpoint.

    Raises PastaError if no token ends its answers.
    """
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    ends = (loaded.eos_ids, loaded.end)
    return {
        "encoder": PromptEncoder(tokenizer, forbidden_ids=checkpoint.control.ids),
        "vocabulary": vocabulary_of(tokenizer, checkpoint.control, vocabulary_size, *ends),
        "topic": checkpoint.topic == "required",
        "eagerness": checkpoint.eagerness,
        "parallel": bool(checkpoint.joins),
        "trained": not checkpoint.joins or joining in checkpoint.joins,
        "warning": loaded.warning,
    }


def joining_for(checkpoint: Checkpoint, wanted: Joining | None, able: Sequence[Joining]) -> Joining:
    """Return `wanted` if it is named, else the first join that both sides know.

    Raises PastaError if there is none: behind a sync, main would see what it was not trained on.
    """
    if wanted is not None:
        return wanted
    known = [joining for joining in able if joining in checkpoint.joins]
    if known or not checkpoint.joins:
        return (known or able)[0]
    raise PastaError(
        f"the checkpoint was trained for the joins {', '.join(checkpoint.joins)}, not "
        + " or ".join(repr(joining.value) for joining in able),
        hint=f"Use another adapter, or --join {able[-1]} to decode with this one all the same.",
    )
