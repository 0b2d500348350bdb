"""The application: OpenAI's routes, the page, health and metrics, over any backends."""

import asyncio
import base64
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse

from pasta_decoding import __version__
from pasta_decoding.answer.settings import Priority
from pasta_decoding.errors import PastaError, excerpt
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError, install
from pasta_decoding.server.guard import Guard
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.replies import Reply
from pasta_decoding.server.requests import Body, ChatRequest, CompletionRequest, Prompt
from pasta_decoding.server.settings import Settings

log = logging.getLogger(__name__)

Replies = dict[int | str, dict[str, Any]]

LOOPBACK_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
EXTRA_ALTERNATIVES = 16
"""Alternatives to fetch beyond those asked for, since tags among them are dropped."""
ERRORS: Replies = {
    status: {"model": schema.ErrorReply}
    for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503)
}


def create_app(backends: Mapping[str, Backend], metrics: Metrics, settings: Settings) -> FastAPI:
    """Return the application. It stops the backends when it stops.

    backends: by the model names of requests. The first is the model, loaded when the application
        starts. A second one is its sequential baseline, loaded at its first request.
    """
    all_backends = list(backends.values())

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        await all_backends[0].ready()
        yield
        for backend in all_backends:
            await backend.stop()

    app = FastAPI(
        title="Pasta",
        version=__version__,
        lifespan=life,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the address in `Host`
    )
    app.add_middleware(Guard, metrics=metrics, settings=settings)
    if settings.hosts is not None:
        # DNS rebinding: a foreign page whose name resolves to this server could read replies.
        hosts = [*LOOPBACK_NAMES, *settings.hosts]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.include_router(_openai_routes(backends, settings.answer_tokens))
    app.include_router(_other_routes(all_backends, metrics))
    install(app)
    return app


def _openai_routes(backends: Mapping[str, Backend], answer_tokens: int) -> APIRouter:
    """Return the routes of OpenAI's API.

    answer_tokens: the token limit of requests that set none.
    """
    router = APIRouter(prefix="/v1", responses=ERRORS)
    began_s = int(time.time())

    @router.post("/chat/completions", responses=_replies(schema.ChatCompletion, schema.ChatChunk))
    async def chat(body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await reply(body)

    @router.post("/completions", responses=_replies(schema.TextCompletion, schema.TextCompletion))
    async def complete(body: CompletionRequest) -> Response:
        """Continue a text, without the chat template."""
        return await reply(body)

    async def reply(body: Body) -> Response:
        """Answer each choice of the first prompt, of the second, and so on."""
        n = body.n or 1
        max_tokens = body.limit or answer_tokens
        name = body.model
        decoder = await _decoder(backends, name, n * len(body.prompts))
        if body.pasta_parallel is False and decoder.parallel:
            name = _baseline_name(backends)
            decoder = await _decoder(backends, name, n * len(body.prompts))
        prompts = [
            await asyncio.to_thread(_prompt_ids, decoder, prompt, max_tokens)
            for prompt in body.prompts
        ]
        config = body.config(max_tokens)
        priority = Priority[body.pasta_priority or "normal"]
        logprobs = None if body.alternatives is None else body.alternatives + EXTRA_ALTERNATIVES
        sampling = config.sampling(logprobs=logprobs)
        requests = [
            decoder.request(prompts[choice // n], config.rules, sampling, choice, priority)
            for choice in range(n * len(prompts))
        ]
        return Reply(body, decoder, backends[name].submit(requests))

    @router.get("/models")
    async def models() -> schema.ModelList:
        """List the models: one, and its sequential baseline if there is one."""
        return schema.ModelList(data=[model(name) for name in backends])

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> schema.Model:
        """Describe a model, which is loaded if it was not."""
        await _decoder(backends, name, answers=0)
        return model(name)

    def model(name: str) -> schema.Model:
        decoder = backends[name].decoder
        context_tokens = None if decoder is None else decoder.context_tokens
        return schema.Model(
            id=name, created=began_s, owned_by="pasta", max_model_len=context_tokens
        )

    return router


def _baseline_name(backends: Mapping[str, Backend]) -> str:
    """Return the name of the baseline, which answers sequentially; ApiError if there is none."""
    _, *baselines = backends
    if not baselines:
        message = "this server has no baseline that answers sequentially: `pasta serve --baseline`"
        raise ApiError(400, message, param="pasta_parallel")
    return baselines[0]


def _prompt_ids(decoder: Decoder, prompt: Prompt, max_tokens: int) -> Sequence[int]:
    """Return the token ids of a prompt of a request. A text is continued without a template."""
    if isinstance(prompt, tuple):
        return prompt
    return decoder.prompt_ids(prompt, max_tokens, plain=isinstance(prompt, str))


async def _decoder(backends: Mapping[str, Backend], model: str, answers: int) -> Decoder:
    """Return the decoder of a model, which is loaded if it was not.

    Raises ApiError for an unknown model, a model that cannot be loaded, or without room for this
    number of answers.
    """
    if (backend := backends.get(model)) is None:
        first, *_ = backends
        message = f"there is no model {excerpt(model)!r} here, but {first!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    backend.check_room(answers)
    try:
        return await backend.ready()
    except ApiError:
        raise
    except Exception as error:
        is_explained = isinstance(error, PastaError)
        log.warning("a model cannot be loaded: %s", error, exc_info=not is_explained)
        reason = error if is_explained else "the server's log says why"
        message = f"the model cannot be loaded: {reason}"
        raise ApiError(503, message, code="model_not_loaded") from error


def _replies(plain: type[schema.Wire], chunk: type[schema.Wire]) -> Replies:
    """Return the OpenAPI description of a route that replies plainly or by a stream of chunks."""
    data = {"type": "string", "description": f"a {chunk.__name__} as JSON; at last [DONE]"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        200: {
            "model": plain,
            "description": "The whole reply, or, with `stream`, server-sent events.",
            "content": {"text/event-stream": {"schema": event}},
        }
    }


def _other_routes(backends: Sequence[Backend], metrics: Metrics) -> APIRouter:
    router = APIRouter()
    page = files("pasta_decoding.server").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _content_policy(page), "Referrer-Policy": "no-referrer"}

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.get("/health", response_model=schema.Health, responses={503: {"model": schema.Health}})
    async def health(response: Response) -> schema.Health:
        """Say whether the engine lives."""
        model = backends[0]
        running = min(model.unended, model.load.max_requests)
        response.status_code = 200 if model.alive else 503
        return schema.Health(
            status="ok" if model.alive else "failed",
            running=running,
            waiting=model.unended - running,
        )

    text_plain: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    metrics_replies: Replies = {200: text_plain, 401: ERRORS[401]}

    @router.get("/metrics", response_class=Response, responses=metrics_replies)
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        activities = [backend.activity for backend in backends]
        text = metrics.render(activities, sum(backend.unended for backend in backends))
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def _content_policy(page: str) -> str:
    """Return a policy under which only the page's own scripts run, and send requests only here.

    A script in an answer cannot run even if the page's own code inserts it.
    """
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for tag, body in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return policy
