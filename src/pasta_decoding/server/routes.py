"""The routes that OpenAI's clients know."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response

from pasta_decoding.api.model import AnyDecoder, request_of
from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.request import Priority
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError, excerpt, not_loaded
from pasta_decoding.server.replies import ChatForm, Reply, TextForm
from pasta_decoding.server.requests import Body, ChatRequest, CompletionRequest, StreamOptions

log = logging.getLogger(__name__)

Ids = tuple[int, ...]

TAGS_AMONG = 16
"""Alternatives that are looked at beyond those that are told: tags among them are left out."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorReply}
    for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503)
}


class OpenAIRoutes:
    """Hands requests to backends and replies with their answers.

    backends:      by the names that clients ask for.
    answer_tokens: the longest answer to a request that does not say.
    """

    def __init__(self, backends: Mapping[str, Backend], answer_tokens: int) -> None:
        self._backends = backends
        self._answer_tokens = answer_tokens
        self._began_s = int(time.time())

    def router(self) -> APIRouter:
        """Return the router that an application includes."""
        router = APIRouter(prefix="/v1", responses=ERRORS)
        chat = _replies(schema.ChatCompletion, schema.ChatChunk)
        router.post("/chat/completions", responses=chat)(self.chat)
        text = _replies(schema.TextCompletion, schema.TextCompletion)
        router.post("/completions", responses=text)(self.complete)
        router.get("/models")(self.models)
        router.get("/models/{name:path}")(self.one_model)
        return router

    async def chat(self, body: ChatRequest) -> Response:
        """Answer a conversation."""
        decoder = await self._decoder(body.model, answers=body.n or 1)
        messages = [one.message for one in body.messages]
        prompt = decoder.chat_ids(messages, body.limit or self._answer_tokens)
        return self._reply(body, decoder, [prompt])

    async def complete(self, body: CompletionRequest) -> Response:
        """Continue a text, without the chat template."""
        decoder = await self._decoder(body.model, answers=len(body.prompts) * (body.n or 1))
        limit = body.limit or self._answer_tokens
        prompts = [
            decoder.text_ids(prompt, limit) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        return self._reply(body, decoder, prompts)

    async def models(self) -> schema.ModelList:
        """List the models: one, and its sequential baseline if there is one."""
        return schema.ModelList(data=[self._model(name) for name in self._backends])

    async def one_model(self, name: str) -> schema.Model:
        """Describe a model, which is loaded if it was not."""
        await self._decoder(name, answers=0)
        return self._model(name)

    def _model(self, name: str) -> schema.Model:
        decoder = self._backends[name].decoder
        most = None if decoder is None else decoder.max_tokens
        return schema.Model(id=name, created=self._began_s, owned_by="pasta", max_model_len=most)

    async def _decoder(self, model: str, answers: int) -> AnyDecoder:
        """Return the decoder of a model, if there is room for some more answers."""
        if (backend := self._backends.get(model)) is None:
            first, *_ = self._backends
            message = f"there is no model {excerpt(model)!r} here, but {first!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        backend.check_room(answers)
        try:
            return await backend.ready()
        except PastaError as error:
            raise not_loaded(str(error)) from error
        except ApiError:
            raise
        except Exception as error:
            log.exception("a model cannot be loaded")
            raise not_loaded("the server's log says why") from error

    def _reply(self, body: Body, decoder: AnyDecoder, prompts: Sequence[Ids]) -> Response:
        """Hand in an answer for each choice of the first prompt, of the second, and so on."""
        config = body.config(self._answer_tokens)
        logprobs = None if body.alternatives is None else body.alternatives + TAGS_AMONG
        form = ChatForm if isinstance(body, ChatRequest) else TextForm
        priority = Priority[body.pasta_priority or "normal"]
        choices = [prompt for prompt in prompts for _ in range(body.n or 1)]
        requests = [
            request_of(decoder, prompt, config, n, logprobs=logprobs, priority=priority)
            for n, prompt in enumerate(choices)
        ]
        return Reply(
            form(body.alternatives, decoder.vocabulary.texts),
            body.model,
            self._backends[body.model].submit(requests),
            (body.stream_options or StreamOptions()) if body.stream else None,
            sum(map(len, prompts)),
            decoder.plain_tokens,
        )


def _replies(whole: type[schema.Wire], chunk: type[schema.Wire]) -> dict[int | str, dict[str, Any]]:
    data = {"type": "string", "description": f"a {chunk.__name__} as JSON; at last [DONE]"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        200: {
            "model": whole,
            "description": "The whole reply, or, with `stream`, server-sent events.",
            "content": {"text/event-stream": {"schema": event}},
        }
    }
