"""OpenAI's two forms of a reply, whole and in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from uuid import uuid4

from pasta_decoding import __version__
from pasta_decoding.runtime.sampling import TokenLogprobs
from pasta_decoding.runtime.stop_filter import Placed
from pasta_decoding.runtime.vocabulary import FRAGMENT
from pasta_decoding.server import schema

LEAST_LOGPROB = -9999.0
"""What is told of a token that could not have come; JSON knows no infinity."""
FINGERPRINT = f"pasta-{__version__}"


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of one choice on its way out. The last one of a choice has a reason."""

    choice: int
    text: str
    events: tuple[schema.Event, ...] = ()
    tokens: tuple[Placed, ...] = ()
    reason: schema.FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What all pieces of a reply begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """Make one up, now."""
        return cls(f"{prefix}-{uuid4().hex}", int(time.time()), model)


class Form(Protocol):
    """One of OpenAI's two forms of a reply."""

    prefix: str

    def begin(self, head: Head, choices: int) -> list[schema.Wire]:
        """Return what a stream begins with."""
        ...

    def chunk(self, head: Head, part: ReplyPart, events: list[schema.Event] | None) -> schema.Wire:
        """Return a piece of a stream."""
        ...

    def last(self, head: Head, usage: schema.Usage) -> schema.Wire:
        """Return the piece that tells what it cost."""
        ...

    def whole(self, head: Head, parts: Sequence[ReplyPart], usage: schema.Usage) -> schema.Wire:
        """Return the plain reply; one part a choice."""
        ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`/v1/chat/completions`.

    alternatives: how many to tell beside each token; None: nothing about tokens.
    texts:        of each token.
    """

    alternatives: int | None
    texts: Sequence[str]
    prefix = "chatcmpl"

    def begin(self, head: Head, choices: int) -> list[schema.Wire]:
        """Say whose words will follow."""
        delta = schema.ChatDelta(role="assistant", content="")
        pieces = (schema.ChatChunkChoice(index=index, delta=delta) for index in range(choices))
        return [self._chunk(head, [piece]) for piece in pieces]

    def chunk(self, head: Head, part: ReplyPart, events: list[schema.Event] | None) -> schema.Wire:
        """See `Form`."""
        piece = schema.ChatChunkChoice(
            index=part.choice,
            delta=schema.ChatDelta(content=part.text or None),
            logprobs=self._logprobs(part) if part.tokens else None,
            finish_reason=part.reason,
            pasta_events=events,
        )
        return self._chunk(head, [piece])

    def last(self, head: Head, usage: schema.Usage) -> schema.Wire:
        """See `Form`."""
        return self._chunk(head, [], usage)

    def whole(self, head: Head, parts: Sequence[ReplyPart], usage: schema.Usage) -> schema.Wire:
        """See `Form`."""
        choices = [
            schema.ChatChoice(
                index=part.choice,
                message=schema.AssistantMessage(content=part.text),
                logprobs=self._logprobs(part),
                finish_reason=_reason(part),
            )
            for part in parts
        ]
        return schema.ChatCompletion(**_fields(head), choices=choices, usage=usage)

    def _logprobs(self, part: ReplyPart) -> schema.ChatLogprobs | None:
        if self.alternatives is None:
            return None
        return schema.ChatLogprobs(content=[self._token(one.logprobs) for one in part.tokens])

    def _token(self, found: TokenLogprobs) -> schema.TokenLogprob:
        top = alternatives(found, self.alternatives or 0, self.texts)
        ranked = [schema.TopLogprob(**_told(self.texts[one], logprob)) for one, logprob in top]
        own = _told(self.texts[found.token], found.logprob)
        return schema.TokenLogprob(**own, top_logprobs=ranked)

    def _chunk(
        self, head: Head, choices: list[schema.ChatChunkChoice], usage: schema.Usage | None = None
    ) -> schema.ChatChunk:
        return schema.ChatChunk(**_fields(head), choices=choices, usage=usage)


@dataclass(frozen=True, slots=True)
class TextForm:
    """`/v1/completions`. Its fields are those of `ChatForm`."""

    alternatives: int | None
    texts: Sequence[str]
    prefix = "cmpl"

    def begin(self, head: Head, choices: int) -> list[schema.Wire]:  # noqa: ARG002
        """Say nothing: text begins with text."""
        return []

    def chunk(self, head: Head, part: ReplyPart, events: list[schema.Event] | None) -> schema.Wire:
        """See `Form`."""
        return schema.TextChunk(**_fields(head), choices=[self._choice(part, events)])

    def last(self, head: Head, usage: schema.Usage) -> schema.Wire:
        """See `Form`."""
        return schema.TextChunk(**_fields(head), choices=[], usage=usage)

    def whole(self, head: Head, parts: Sequence[ReplyPart], usage: schema.Usage) -> schema.Wire:
        """See `Form`."""
        choices = [self._choice(part) for part in parts]
        return schema.TextCompletion(**_fields(head), choices=choices, usage=usage)

    def _choice(
        self, part: ReplyPart, events: list[schema.Event] | None = None
    ) -> schema.TextChoice:
        return schema.TextChoice(
            index=part.choice,
            text=part.text,
            logprobs=self._logprobs(part) if part.text or part.tokens else None,
            finish_reason=part.reason,
            pasta_events=events,
        )

    def _logprobs(self, part: ReplyPart) -> schema.TextLogprobs | None:
        if self.alternatives is None:
            return None
        found = [one.logprobs for one in part.tokens]
        return schema.TextLogprobs(
            tokens=[self.texts[one.token] for one in found],
            token_logprobs=[max(one.logprob, LEAST_LOGPROB) for one in found],
            top_logprobs=[self._ranked(one) for one in found],
            text_offset=[one.start for one in part.tokens],
        )

    def _ranked(self, found: TokenLogprobs) -> dict[str, float]:
        top = alternatives(found, self.alternatives or 0, self.texts)
        ranked = [*top, (found.token, found.logprob)]
        return {self.texts[token]: max(logprob, LEAST_LOGPROB) for token, logprob in ranked}


def alternatives(found: TokenLogprobs, most: int, texts: Sequence[str]) -> list[tuple[int, float]]:
    """Return the likeliest tokens that are text: a reader knows nothing of tags and ends."""
    return [(token, logprob) for token, logprob in found.top if texts[token]][:most]


def _told(text: str, logprob: float) -> dict[str, Any]:
    whole = None if FRAGMENT in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": whole}


def _reason(part: ReplyPart) -> schema.FinishReason:
    assert part.reason is not None, "a whole answer has ended"
    return part.reason


def _fields(head: Head) -> dict[str, Any]:
    return asdict(head)
