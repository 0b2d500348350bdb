"""The routes that OpenAI's clients know."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.worker import AnyDecoder
from pasta_decoding.errors import PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.governor import Priority
from pasta_decoding.runtime.worker import ClosedError
from pasta_decoding.server import requests, schema
from pasta_decoding.server.answers import Ask
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError, excerpt
from pasta_decoding.server.forms import ChatForm, Form, TextForm
from pasta_decoding.server.guard import Places
from pasta_decoding.server.replies import Reply
from pasta_decoding.server.transport import StreamedReply, WholeReply

log = logging.getLogger("pasta_decoding.server")

TAGS_AMONG = 16
"""Alternatives that are looked at beside those that are told: some may be tags, which are not."""
_SAMPLED = (
    *("temperature", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of requests that are called as in `GenerationConfig`, and mean the same."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorReply}
    for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503)
}


class OpenAIRoutes:
    """Takes requests to backends, and what these write to replies.

    backends:       by the names that clients ask for.
    answer_tokens:  most tokens of an answer whose request does not say.
    client_answers: how many answers a client may have under way; None: any number.
    """

    def __init__(
        self, backends: Mapping[str, Backend], answer_tokens: int, client_answers: int | None
    ) -> None:
        self._backends = backends
        self._answer_tokens = answer_tokens
        self._places = Places(client_answers)
        self._began_s = int(time.time())

    def router(self) -> APIRouter:
        """Return what an application includes."""
        router = APIRouter(prefix="/v1", responses=ERRORS)
        chat = _replies(schema.ChatCompletion, schema.ChatChunk)
        router.post("/chat/completions", responses=chat)(self.chat)
        text = _replies(schema.TextCompletion, schema.TextChunk)
        router.post("/completions", responses=text)(self.complete)
        router.get("/models")(self.models)
        router.get("/models/{name:path}")(self.one_model)
        return router

    async def chat(self, body: requests.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        decoder = await self._decoder_for(body, prompts=1)
        limit = body.limit or self._answer_tokens
        messages = [Message(_role(message.role), message.text) for message in body.messages]
        prompts = [decoder.chat_ids(messages, limit)]
        return self._answer(body, request, ChatForm, decoder, _asks(body, prompts, limit))

    async def complete(self, body: requests.CompletionRequest, request: Request) -> Response:
        """Go on from a text, without the chat template."""
        decoder = await self._decoder_for(body, prompts=len(body.prompts))
        limit = body.limit or self._answer_tokens
        prompts = [
            decoder.text_ids(prompt, limit) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        return self._answer(body, request, TextForm, decoder, _asks(body, prompts, limit))

    async def models(self) -> schema.ModelList:
        """List the models: one, and its sequential baseline if there is one."""
        return schema.ModelList(data=[self._model(name) for name in self._backends])

    async def one_model(self, name: str) -> schema.Model:
        """Tell about a model, which is loaded if it was not."""
        backend = self._backend(name)
        if backend.decoder is None:
            await _loaded(backend)
        return self._model(name)

    def _model(self, name: str) -> schema.Model:
        decoder = self._backends[name].decoder
        most = None if decoder is None else decoder.max_tokens
        return schema.Model(id=name, created=self._began_s, owned_by="pasta", max_model_len=most)

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            first, *_ = self._backends
            message = f"there is no model {excerpt(name)!r} here, but {first!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._backends[name]

    async def _decoder_for(self, body: requests.Body, prompts: int) -> AnyDecoder:
        """Return the decoder of the model that is asked for.

        Refuses what would be refused later, before time goes into reading its prompts.
        """
        backend = self._backend(body.model)
        backend.capacity.check_room(prompts * (body.n or 1))
        return await _loaded(backend)

    def _answer(
        self,
        body: requests.Body,
        request: Request,
        form_of: Callable[[int | None, Sequence[str]], Form],
        decoder: AnyDecoder,
        asks: Sequence[Ask],
    ) -> Response:
        form = form_of(body.alternatives, decoder.vocabulary.texts)
        prompt_tokens = sum(len(ask.prompt) for ask in asks[:: body.n or 1])
        reply = Reply(form, body.model, len(asks), prompt_tokens, decoder.plain_tokens)
        leave = self._places.take(request.client.host if request.client else "", len(asks))
        try:
            answers = self._backends[body.model].submit(asks)
        except BaseException:
            leave()
            raise
        if body.stream:
            return StreamedReply(answers, leave, reply.stream(answers, body.options))
        return WholeReply(answers, leave, reply.whole)


async def _loaded(backend: Backend) -> AnyDecoder:
    try:
        return await backend.ready()
    except ClosedError:
        raise
    except PastaError as error:
        raise _not_loaded(str(error)) from error
    except Exception as error:
        log.exception("a model cannot be loaded")
        raise _not_loaded("the server's log says why") from error


def _not_loaded(why: str) -> ApiError:
    message = f"the model cannot be loaded: {why}"
    return ApiError(503, message, kind="server_error", code="model_not_loaded")


def _asks(body: requests.Body, prompts: Sequence[tuple[int, ...]], limit: int) -> list[Ask]:
    """Return one ask a choice: the choices of the first prompt, then those of the second, ..."""
    config = _config(body, limit)
    alternatives = None if body.alternatives is None else body.alternatives + TAGS_AMONG
    rules, sampling = config.rules, config.sampling(logprobs=alternatives)
    each = [prompt for prompt in prompts for _ in range(body.n or 1)]
    priority = Priority[body.pasta_priority or "normal"]
    return [
        Ask(ids, rules, sampling, choice, config.stops, priority) for choice, ids in enumerate(each)
    ]


def _config(body: requests.Body, limit: int) -> GenerationConfig:
    """Return how the answers are written; OpenAI's defaults differ from ours."""
    told: dict[str, Any] = {"temperature": 1.0, "seed": secrets.randbits(63)}
    told |= {name: value for name in _SAMPLED if (value := getattr(body, name)) is not None}
    return GenerationConfig(
        **told,
        max_tokens=limit,
        parallel=body.pasta_parallel is not False,
        stop=body.stop,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        logit_bias=body.logit_bias or {},
    )


def _role(role: str) -> str:
    """OpenAI's newer name for who sets the rules."""
    return "system" if role == "developer" else role


def _replies(whole: type[schema.Wire], chunk: type[schema.Wire]) -> dict[int | str, dict[str, Any]]:
    data = {"type": "string", "description": f"a {chunk.__name__} as JSON; at last [DONE]"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    about = "The whole reply, or, with `stream`, server-sent events."
    return {
        200: {
            "model": whole,
            "description": about,
            "content": {"text/event-stream": {"schema": event}},
        }
    }
