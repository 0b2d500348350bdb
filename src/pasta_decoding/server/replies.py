"""From answers that are being written to OpenAI's replies; the plain reply folds the stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from pasta_decoding import __version__
from pasta_decoding.runtime import events as live
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.sampling import TokenLogprobs
from pasta_decoding.runtime.stop_filter import Placed
from pasta_decoding.runtime.vocabulary import FRAGMENT
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Answers, Ended, Piece
from pasta_decoding.server.requests import StreamOptions

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


@dataclass
class Reply:
    """One reply: it takes the answers in and gives the parts out, and knows then what it cost.

    choices:       how many answers there are.
    prompt_tokens: of all prompts together, each counted once.
    plain_tokens:  counts the tokens of a text.
    """

    form: Form
    model: str
    choices: int
    prompt_tokens: int
    plain_tokens: Callable[[str], int]
    _answers: list[Answer] = field(default_factory=list)
    _texts: list[list[str]] = field(init=False)
    _tokens: list[list[Placed]] = field(init=False)

    def __post_init__(self) -> None:
        self._head = Head.new(self.form.prefix, self.model)
        self._texts = [[] for _ in range(self.choices)]
        self._tokens = [[] for _ in range(self.choices)]

    async def stream(self, answers: Answers, options: StreamOptions) -> AsyncIterator[schema.Wire]:
        """Yield the pieces of the stream as they come."""
        for piece in self.form.begin(self._head, self.choices):
            yield piece
        async for part in self._parts(answers):
            events = list(part.events) if options.pasta_events and part.events else None
            if part.text or part.reason or events:
                yield self.form.chunk(self._head, part, events)
        if options.include_usage:
            yield self.form.last(self._head, self._usage())

    async def whole(self, answers: Answers) -> schema.Wire:
        """Wait for the end and return everything at once."""
        reasons = {part.choice: part.reason async for part in self._parts(answers)}
        parts = [
            ReplyPart(
                choice,
                "".join(self._texts[choice]),
                tokens=tuple(self._tokens[choice]),
                reason=reasons[choice],
            )
            for choice in range(self.choices)
        ]
        return self.form.whole(self._head, parts, self._usage())

    async def _parts(self, answers: Answers) -> AsyncIterator[ReplyPart]:
        async for item in answers:
            match item:
                case Piece(choice, step, events, text, tokens):
                    self._texts[choice].append(text)
                    self._tokens[choice] += tokens
                    yield ReplyPart(
                        choice, text, tuple(wired(event, step) for event in events), tokens
                    )
                case Ended(choice, answer):
                    self._answers.append(answer)
                    yield ReplyPart(choice, "", reason="length" if answer.hit_limit else "stop")

    def _usage(self) -> schema.Usage:
        fed = sum(answer.fed_tokens for answer in self._answers)
        return schema.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=fed,
            total_tokens=self.prompt_tokens + fed,
            plain_tokens=sum(self.plain_tokens("".join(text)) for text in self._texts),
            critical_path=max(answer.critical_path for answer in self._answers),
            threads=max(1 + answer.chunks for answer in self._answers),
            trimmed_tokens=sum(answer.trimmed_tokens for answer in self._answers),
        )


def wired(event: live.Event, step: int) -> schema.Event:
    """Return a live event as it is sent."""
    match event:
        case live.Opened(thread, topic, tokens):
            return schema.Opened(step=step, thread=thread, topic=topic, tokens=tokens)
        case live.Delta(thread, text):
            return schema.Delta(step=step, thread=thread, text=text)
        case live.Closed(thread, truncated):
            return schema.Closed(step=step, thread=thread, truncated=truncated)
        case live.Synced(threads):
            return schema.Synced(step=step, threads=threads)
        case live.Trimmed(characters):
            return schema.Trimmed(step=step, characters=characters)
        case live.Finished(truncated):
            return schema.Finished(step=step, truncated=truncated)


def server_sent(pieces: Iterable[schema.Wire]) -> bytes:
    """Return pieces as server-sent events."""
    return b"".join(b"data: " + piece.model_dump_json().encode() + b"\n\n" for piece in pieces)


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
