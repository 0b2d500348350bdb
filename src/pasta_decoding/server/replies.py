"""From answers that are being written to OpenAI's replies; the plain reply folds the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from pasta_decoding.runtime import events as live
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.stop_filter import Placed
from pasta_decoding.server import schema
from pasta_decoding.server.answers import Answers, Ended, Piece
from pasta_decoding.server.forms import Form, Head, ReplyPart
from pasta_decoding.server.requests import StreamOptions
from pasta_decoding.server.usage import usage_of


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
        plain_tokens = sum(self.plain_tokens("".join(text)) for text in self._texts)
        return usage_of(self._answers, self.prompt_tokens, plain_tokens)


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
