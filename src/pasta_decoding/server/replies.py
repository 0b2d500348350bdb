"""OpenAI's replies, made while the answers are written. A plain reply is a fold of the stream."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import anyio
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pasta_decoding import __version__
from pasta_decoding.answer.events import ShownToken, TokenLogprobs
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.vocabulary import FRAGMENT
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Answers
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.requests import Body, ChatRequest, StreamOptions

MIN_LOGPROB = -9999.0
"""Stands for the log probability minus infinity, which JSON does not have."""
EVENTS_SILENCE_S = 1.0
"""Time without text after which a stream with events says what it waits for."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Reply(Response):
    """A reply to one request. If the client leaves, its answers are cancelled.

    answers: `body.n` for each prompt, in the order of the prompts.
    """

    def __init__(self, body: Body, decoder: Decoder, answers: Answers) -> None:
        super().__init__()
        self._body = body
        self._decoder = decoder
        self._answers = answers
        self._is_chat = isinstance(body, ChatRequest)
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"pasta-{__version__}",
        }
        self._ended: dict[int, Answer] = {}
        self._texts: list[list[str]] = [[] for _ in range(answers.choices)]
        self._tokens: list[list[ShownToken]] = [[] for _ in range(answers.choices)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply. The answers are closed on every way out."""
        with closing(self._answers):
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                response: Response
                if self._body.stream:
                    lines = self._lines(self._body.stream_options or StreamOptions())
                    response = StreamingResponse(lines, 200, _HEADERS, "text/event-stream")
                else:
                    response = await self._plain_response()
                await response(scope, receive, send)
                group.cancel_scope.cancel()

    async def _plain_response(self) -> Response:
        try:
            async for _ in self._pieces():
                pass
        except ApiError as error:
            return error.response()
        choices = [
            self._choice(index, "".join(text), tokens, self._ended[index], is_plain=True)
            for index, (text, tokens) in enumerate(zip(self._texts, self._tokens, strict=True))
        ]
        kind = schema.ChatCompletion if self._is_chat else schema.TextCompletion
        reply = kind(**self._head, choices=choices, usage=self._usage())
        return Response(reply.model_dump_json(), media_type="application/json")

    async def _lines(self, options: StreamOptions) -> AsyncIterator[bytes]:
        chunk = schema.ChatChunk if self._is_chat else schema.TextCompletion
        if options.pasta_events:
            self._answers.silence_s = EVENTS_SILENCE_S
        try:
            async for choices in self._pieces(with_events=options.pasta_events):
                if choices:
                    yield _line(chunk(**self._head, choices=choices))
                else:  # a comment: clients skip it, and proxies see that the stream lives
                    yield f": {self._answers.stage}\n\n".encode()
            if options.include_usage:
                yield _line(chunk(**self._head, choices=[], usage=self._usage()))
        except ApiError as error:
            yield _line(error.body)
        yield b"data: [DONE]\n\n"

    async def _pieces(self, *, with_events: bool = False) -> AsyncIterator[list[Any]]:
        """Yield the choices of each piece; none if there was nothing for a while."""
        if self._is_chat:
            delta = schema.ChatDelta(role="assistant", content="")
            for index in range(self._answers.choices):
                yield [schema.ChatChunkChoice(index=index, delta=delta)]
        async for news in self._answers:
            if news is None:
                yield []
                continue
            index, item = news
            if isinstance(item, Answer):
                self._ended[index] = item
                yield [self._choice(index, "", [], item)]
                continue
            self._texts[index].append(item.text)
            self._tokens[index] += item.tokens
            events = [
                asdict(event) | {"type": type(event).__name__.lower(), "step": item.step}
                for event in item.events
                if with_events
            ]
            if events or item.text:
                yield [self._choice(index, item.text, item.tokens, events=events)]

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[ShownToken],
        answer: Answer | None = None,
        *,
        events: Sequence[dict[str, Any]] = (),
        is_plain: bool = False,
    ) -> Any:
        """Return a choice of a plain reply or of a piece; `answer` if it has ended."""
        reason = answer.finish_reason if answer else None
        logprobs = self._logprobs(tokens) if tokens or is_plain else None
        common: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        if self._is_chat and is_plain:
            return schema.ChatChoice(**common, message=schema.AssistantMessage(content=text))
        common["pasta_events"] = list(events) or None
        if self._is_chat:
            return schema.ChatChunkChoice(**common, delta=schema.ChatDelta(content=text or None))
        return schema.TextChoice(**common, text=text)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> schema.Wire | None:
        if self._body.alternatives is None:
            return None
        ranked = [self._ranked(token.logprobs, self._body.alternatives) for token in tokens]
        if self._is_chat:
            content = []
            for written, *top in ranked:
                top_logprobs = [schema.TopLogprob(**_logprob_fields(*other)) for other in top]
                fields = _logprob_fields(*written)
                content.append(schema.TokenLogprob(**fields, top_logprobs=top_logprobs))
            return schema.ChatLogprobs(content=content)
        return schema.TextLogprobs(
            tokens=[text for (text, _), *_ in ranked],
            token_logprobs=[logprob for (_, logprob), *_ in ranked],
            top_logprobs=[dict([*top, written]) for written, *top in ranked],
            text_offset=[token.start for token in tokens],
        )

    def _ranked(self, logprobs: TokenLogprobs, alternatives: int) -> list[tuple[str, float]]:
        """Return text and log probability of the token that was written, then of alternatives.

        Tags, which have no text, are left out: clients know nothing of them.
        """
        texts = self._decoder.vocabulary.texts
        top = [(token, logprob) for token, logprob in logprobs.top if texts[token]]
        tokens = [(logprobs.token, logprobs.logprob), *top[:alternatives]]
        return [(texts[token], max(logprob, MIN_LOGPROB)) for token, logprob in tokens]

    def _usage(self) -> schema.Usage:
        """Return the usage of all answers. A prompt counts once, not for each of its choices."""
        answers = [answer for _, answer in sorted(self._ended.items())]
        n = self._body.n or 1
        prompt = sum(answer.trace.prompt_tokens for answer in answers[::n])
        fed = sum(answer.fed_tokens for answer in answers)
        plain = sum(self._decoder.plain_tokens("".join(text)) for text in self._texts)
        reused = [answer.trace.reused_tokens for answer in answers]
        cached = sum(min(reused[first : first + n]) for first in range(0, len(reused), n))
        return schema.Usage(
            prompt_tokens=prompt,
            completion_tokens=fed,
            total_tokens=prompt + fed,
            prompt_tokens_details=schema.PromptTokensDetails(cached_tokens=cached),
            plain_tokens=plain,
            critical_path=max(answer.critical_path for answer in answers),
            threads=max(1 + answer.chunks for answer in answers),
            trimmed_tokens=sum(answer.trimmed_tokens for answer in answers),
        )


def _logprob_fields(text: str, logprob: float) -> dict[str, Any]:
    utf8 = None if FRAGMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": utf8}


def _line(piece: schema.Wire) -> bytes:
    return b"data: " + piece.model_dump_json().encode() + b"\n\n"


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
