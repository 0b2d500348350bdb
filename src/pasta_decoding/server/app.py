"""The application: OpenAI's routes, the page, health and metrics, over any backends."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse

from pasta_decoding import __version__
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import install
from pasta_decoding.server.guard import Guard
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.routes import OpenAIRoutes
from pasta_decoding.server.settings import Settings

Replies = dict[int | str, dict[str, Any]]

LOOPBACK_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


def create_app(backends: Mapping[str, Backend], metrics: Metrics, settings: Settings) -> FastAPI:
    """Return the application. It stops the backends when it stops.

    backends: by the names that clients ask for. The first is the model, loaded when the application
        starts. A second one is its sequential baseline, loaded when it is first asked for.
    """

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        model, *_ = backends.values()
        await model.ready()
        yield
        for backend in backends.values():
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
        # Else a page from elsewhere could have its name lead here, and read along (DNS rebinding).
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
    app.include_router(OpenAIRoutes(backends, settings.answer_tokens).router())
    app.include_router(_other_routes(list(backends.values()), metrics))
    install(app)
    return app


def _other_routes(backends: Sequence[Backend], metrics: Metrics) -> APIRouter:
    """Return the routes of the page, of health and of the metrics."""
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

    text_plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    metrics_replies: Replies = {200: text_plain, 401: {"model": schema.ErrorReply}}

    @router.get("/metrics", response_class=Response, responses=metrics_replies)
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        activities = [one.activity for one in backends]
        text = metrics.render(activities, sum(one.unended for one in backends))
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def _content_policy(page: str) -> str:
    """Return a policy under which only the page's own scripts run, and they ask only this server.

    A script that an answer smuggled in would not run even if the page's own code put it there.
    """

    def digests(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        found = (base64.b64encode(hashlib.sha256(body.encode()).digest()) for body in bodies)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in found)

    return (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"script-src {digests('script')}; style-src {digests('style')}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
