"""The application: OpenAI's routes, the page, health and metrics, over any backend."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse

from pasta_decoding import __version__
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.governor import Priority
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from pasta_decoding.server import requests, schema
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError, excerpt, install
from pasta_decoding.server.guard import Entry, Guard, Places
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.questions import Ask
from pasta_decoding.server.replies import ChatForm, Form, Reply, TextForm
from pasta_decoding.server.settings import Settings
from pasta_decoding.server.transport import StreamedReply, WholeReply

TAGS_AMONG = 16
"""Alternatives that are looked at beside those that are told: some may be tags, which are not."""
OPEN_PATHS = frozenset({"/", "/health"})
"""What is shown without the API key: nothing that tells what others ask."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorReply}
    for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503)
}


@dataclass(frozen=True, slots=True)
class Rival:
    """A second model, the sequential baseline that the page's race is against."""

    model: str
    backend: Backend


def create_app(
    backend: Backend, metrics: Metrics, settings: Settings, rival: Rival | None = None
) -> FastAPI:
    """Return the application. It starts the backends when it starts, and stops them."""
    backends = [backend] if rival is None else [backend, rival.backend]

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        for one in backends:
            await one.start()
        yield
        for one in backends:
            await one.stop()

    app = FastAPI(
        title="Pasta",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # they would lead to whatever `Host` says
    )
    app.add_middleware(
        Guard,
        metrics=metrics,
        entry=Entry(settings.api_key, settings.hosts, OPEN_PATHS),
        max_body_bytes=settings.max_body_bytes,
        body_s=settings.body_s,
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.include_router(openai_routes(backend, settings, rival))
    app.include_router(other_routes(backend, metrics))
    install(app)
    return app


def openai_routes(backend: Backend, settings: Settings, rival: Rival | None = None) -> APIRouter:
    """Return the routes that OpenAI's clients know."""
    router = APIRouter(prefix="/v1", responses=ERRORS)
    places = Places(settings.client_answers)
    listed = {settings.model: backend} | ({rival.model: rival.backend} if rival else {})
    desks = {
        name: _Desk(one, replace(settings, model=name), places) for name, one in listed.items()
    }
    began_s = int(time.time())
    known = {
        name: schema.Model(
            id=name, created=began_s, owned_by="pasta", max_model_len=one.questions.max_tokens
        )
        for name, one in listed.items()
    }

    def desk_for(name: str) -> _Desk:
        if name not in desks:
            message = f"there is no model {excerpt(name)!r} here, but {settings.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return desks[name]

    @router.post("/chat/completions", responses=_replies(schema.ChatCompletion, schema.ChatChunk))
    async def chat(body: requests.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        desk = desk_for(body.model)
        desk.check(body, prompts=1)
        limit = body.limit or settings.answer_tokens
        messages = [Message(_role(message.role), message.text) for message in body.messages]
        prompt = desk.backend.questions.chat_prompt(messages, limit)
        return desk.answer(body, request, ChatForm, [prompt], limit)

    @router.post("/completions", responses=_replies(schema.TextCompletion, schema.TextChunk))
    async def complete(body: requests.CompletionRequest, request: Request) -> Response:
        """Go on from a text, without the chat template."""
        desk = desk_for(body.model)
        desk.check(body, prompts=len(body.prompts))
        limit = body.limit or settings.answer_tokens
        prompts = [
            desk.backend.questions.text_prompt(prompt, limit)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in body.prompts
        ]
        return desk.answer(body, request, TextForm, prompts, limit)

    @router.get("/models", response_model=schema.ModelList)
    async def models() -> schema.ModelList:
        """List the models: one, and its sequential baseline if there is one."""
        return schema.ModelList(data=list(known.values()))

    @router.get("/models/{name:path}", response_model=schema.Model)
    async def one_model(name: str) -> schema.Model:
        """Tell about a model."""
        return known[desk_for(name).settings.model]

    return router


@dataclass(frozen=True, slots=True)
class _Desk:
    """What both kinds of request go through."""

    backend: Backend
    settings: Settings
    places: Places

    def check(self, body: requests.AnswerRequest, prompts: int) -> None:
        """Refuse what would be refused later, before time goes into reading its prompts."""
        self.backend.capacity.check_room(prompts * (body.n or 1))

    def answer(
        self,
        body: requests.Body,
        request: Request,
        form_of: Callable[[int | None, Sequence[str]], Form],
        prompts: Sequence[tuple[int, ...]],
        limit: int,
    ) -> Response:
        asks = _asks(body, prompts, limit)
        prompt_tokens = sum(map(len, prompts))
        decoder = self.backend.questions.decoder
        form = form_of(body.alternatives, decoder.vocabulary.texts)
        reply = Reply(form, self.settings.model, len(asks), prompt_tokens, decoder.plain_tokens)
        leave = self.places.take(request.client.host if request.client else "", len(asks))
        try:
            answers = self.backend.submit(asks)
        except BaseException:
            leave()
            raise
        if body.stream:
            return StreamedReply(answers, leave, reply.stream(answers, body.options))
        return WholeReply(answers, leave, reply.whole)


def other_routes(backend: Backend, metrics: Metrics) -> APIRouter:
    """Return the page, and what watches over the server."""
    router = APIRouter()
    page = files("pasta_decoding.server").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": content_policy(page), "Referrer-Policy": "no-referrer"}

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        """Show the page where one watches the threads write."""
        return HTMLResponse(page, headers=headers)

    @router.get("/health", response_model=schema.Health, responses={503: {"model": schema.Health}})
    async def health(response: Response) -> schema.Health:
        """Say whether the engine lives."""
        load = backend.capacity.load
        response.status_code = 200 if backend.alive else 503
        return schema.Health(
            status="ok" if backend.alive else "failed", running=load.running, waiting=load.waiting
        )

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def show_metrics() -> Response:
        """Tell Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return router


def content_policy(page: str) -> str:
    """Return a policy under which only what stands in `page` runs, and it speaks to us alone.

    A script that an answer smuggled in would not run even if the page's own code put it there.
    """
    scripts, styles = (_digests(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {scripts}; "
        f"style-src {styles}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(page: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = (hashlib.sha256(body.encode()).digest() for body in bodies)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _asks(body: requests.Body, prompts: Sequence[tuple[int, ...]], limit: int) -> list[Ask]:
    """Return one ask a choice: the choices of the first prompt, then those of the second, ..."""
    rules = Rules(max_tokens=limit, parallel=body.pasta_parallel is not False)
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=None if body.alternatives is None else body.alternatives + TAGS_AMONG,
    )
    each = [prompt for prompt in prompts for _ in range(body.n or 1)]
    stops = tuple(body.stop)
    priority = Priority[body.pasta_priority or "normal"]
    return [Ask(ids, rules, sampling, choice, stops, priority) for choice, ids in enumerate(each)]


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


_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    401: {"model": schema.ErrorReply},
}
