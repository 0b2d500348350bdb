"""OpenAI's replies, made while the answers are written; the whole reply folds the stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

import anyio
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pasta_decoding import __version__
from pasta_decoding.runtime import events as live
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Placed, Progress, TokenLogprobs
from pasta_decoding.runtime.vocabulary import FRAGMENT
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Answers
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.requests import StreamOptions

LEAST_LOGPROB = -9999.0
"""The log probability of a token that could not have come; JSON has no infinity."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one choice. The last one of a choice has a reason."""

    choice: int
    text: str
    tokens: tuple[Placed, ...] = ()
    events: Sequence[dict[str, Any]] = ()
    reason: schema.FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The replies of `/v1/chat/completions`.

    alternatives: how many to tell for each token; None: nothing about tokens.
    texts:        of each token id.
    """

    alternatives: int | None
    texts: Sequence[str]
    prefix = "chatcmpl"
    whole = schema.ChatCompletion
    chunk = schema.ChatChunk

    def piece(self, part: Part) -> schema.ChatChunkChoice:
        return schema.ChatChunkChoice(
            index=part.choice,
            delta=schema.ChatDelta(content=part.text or None),
            logprobs=self._logprobs(part) if part.tokens else None,
            finish_reason=part.reason,
            pasta_events=list(part.events) or None,
        )

    def choice(self, part: Part) -> schema.ChatChoice:
        assert part.reason is not None, "a whole answer has ended"
        return schema.ChatChoice(
            index=part.choice,
            message=schema.AssistantMessage(content=part.text),
            logprobs=self._logprobs(part),
            finish_reason=part.reason,
        )

    def _logprobs(self, part: Part) -> schema.ChatLogprobs | None:
        if self.alternatives is None:
            return None
        return schema.ChatLogprobs(content=[self._token(one.logprobs) for one in part.tokens])

    def _token(self, found: TokenLogprobs) -> schema.TokenLogprob:
        top = [schema.TopLogprob(**self._told(*one)) for one in alternatives(self, found)]
        return schema.TokenLogprob(**self._told(found.token, found.logprob), top_logprobs=top)

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.texts[token]
        whole = None if FRAGMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": whole}


@dataclass(frozen=True, slots=True)
class TextForm:
    """The replies of `/v1/completions`. Its fields are those of `ChatForm`."""

    alternatives: int | None
    texts: Sequence[str]
    prefix = "cmpl"
    whole = chunk = schema.TextCompletion

    def piece(self, part: Part) -> schema.TextChoice:
        return schema.TextChoice(
            index=part.choice,
            text=part.text,
            logprobs=self._logprobs(part) if part.text or part.tokens else None,
            finish_reason=part.reason,
            pasta_events=list(part.events) or None,
        )

    choice = piece

    def _logprobs(self, part: Part) -> schema.TextLogprobs | None:
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
        ranked = [*alternatives(self, found), (found.token, found.logprob)]
        return {self.texts[token]: max(logprob, LEAST_LOGPROB) for token, logprob in ranked}


Form = ChatForm | TextForm


def alternatives(form: Form, found: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the likeliest tokens that are text; a reader knows nothing of tags and ends."""
    texts = [(token, logprob) for token, logprob in found.top if form.texts[token]]
    return texts[: form.alternatives or 0]


class Reply(Response):
    """A reply that is sent while its answers are written. If the client leaves, they are cancelled.

    options:       None asks for everything at once, as JSON.
    prompt_tokens: of all prompts together, each counted once.
    count_tokens:  counts the tokens of a text.
    """

    def __init__(
        self,
        form: Form,
        model: str,
        answers: Answers,
        options: StreamOptions | None,
        prompt_tokens: int,
        count_tokens: Callable[[str], int],
    ) -> None:
        super().__init__()
        self._form, self._answers, self._options = form, answers, options
        self._prompt_tokens, self._count_tokens = prompt_tokens, count_tokens
        self._head: dict[str, Any] = {
            "id": f"{form.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"pasta-{__version__}",
        }
        self._ended: dict[int, Answer] = {}
        self._parts: list[list[Part]] = [[] for _ in range(answers.choices)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply; every way out closes the answers."""
        with closing(self._answers):
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                if self._options is None:
                    response = await self._whole()
                else:
                    lines = self._lines(self._options)
                    response = StreamingResponse(lines, 200, _HEADERS, "text/event-stream")
                await response(scope, receive, send)
                group.cancel_scope.cancel()

    async def _whole(self) -> Response:
        try:
            async for _part in self._incoming():
                pass
        except ApiError as error:
            return error.response()
        choices: list[Any] = [self._form.choice(_joined(parts)) for parts in self._parts]
        reply = self._form.whole(**self._head, choices=choices, usage=self._usage())
        return Response(reply.model_dump_json(), media_type="application/json")

    async def _lines(self, options: StreamOptions) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces(options):
                yield _line(piece)
        except ApiError as error:
            yield _line(error.body)
        yield b"data: [DONE]\n\n"

    async def _pieces(self, options: StreamOptions) -> AsyncIterator[schema.Wire]:
        chunk = self._form.chunk
        if chunk is schema.ChatChunk:
            delta = schema.ChatDelta(role="assistant", content="")
            for index in range(self._answers.choices):
                yield chunk(
                    **self._head, choices=[schema.ChatChunkChoice(index=index, delta=delta)]
                )
        async for part in self._incoming(events=options.pasta_events):
            if part.text or part.reason or part.events:
                choices: list[Any] = [self._form.piece(part)]
                yield chunk(**self._head, choices=choices)
        if options.include_usage:
            yield chunk(**self._head, choices=[], usage=self._usage())

    async def _incoming(self, *, events: bool = False) -> AsyncIterator[Part]:
        async for choice, item in self._answers:
            if isinstance(item, Progress):
                sent = [_wired(event, item.step) for event in item.events] if events else ()
                part = Part(choice, item.text, item.tokens, sent)
            else:
                self._ended[choice] = item
                part = Part(choice, "", reason="length" if item.hit_limit else "stop")
            self._parts[choice].append(part)
            yield part

    def _usage(self) -> schema.Usage:
        """Return the figures of all answers; prompts are counted once, not for each choice."""
        answers = self._ended.values()
        fed = sum(answer.fed_tokens for answer in answers)
        texts = ("".join(part.text for part in parts) for parts in self._parts)
        cached = schema.PromptTokensDetails(cached_tokens=_cached_tokens(list(answers)))
        return schema.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=fed,
            total_tokens=self._prompt_tokens + fed,
            prompt_tokens_details=cached,
            plain_tokens=sum(map(self._count_tokens, texts)),
            critical_path=max(answer.critical_path for answer in answers),
            threads=max(1 + answer.chunks for answer in answers),
            trimmed_tokens=sum(answer.trimmed_tokens for answer in answers),
        )


def _wired(event: live.Event, step: int) -> dict[str, Any]:
    """Return a live event as it is sent."""
    own = {one.name: getattr(event, one.name) for one in fields(event) if one.name != "logprobs"}
    return {"type": type(event).__name__.lower(), "step": step, **own}


def _joined(parts: Sequence[Part]) -> Part:
    text = "".join(part.text for part in parts)
    tokens = tuple(token for part in parts for token in part.tokens)
    return Part(parts[-1].choice, text, tokens, reason=parts[-1].reason)


def _cached_tokens(answers: Sequence[Answer]) -> int:
    """Count the prompt tokens that none of the answers had to compute."""
    least: dict[tuple[int, ...], int] = {}
    for answer in answers:
        prompt = answer.layouts[0].tokens[: answer.trace.prompt_tokens]
        reused = answer.trace.reused_tokens
        least[prompt] = min(reused, least.get(prompt, reused))
    return sum(least.values())


def _line(piece: schema.Wire) -> bytes:
    return b"data: " + piece.model_dump_json().encode() + b"\n\n"


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
