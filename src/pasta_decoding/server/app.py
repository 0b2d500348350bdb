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
from fastapi.responses import HTMLResponse

from pasta_decoding import __version__
from pasta_decoding.server import schema
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import install
from pasta_decoding.server.guard import Entry, Guard
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.routes import OpenAIRoutes
from pasta_decoding.server.settings import Settings

OPEN_PATHS = frozenset({"/", "/health"})
"""What is shown without the API key: nothing that tells what others ask."""


def create_app(backends: Mapping[str, Backend], metrics: Metrics, settings: Settings) -> FastAPI:
    """Return the application. It stops the backends when it stops.

    backends: by the names that clients ask for. The first is the model, loaded when the application
        starts. A second one is its sequential baseline, loaded when it is first asked for.
    """
    app = FastAPI(
        title="Pasta",
        version=__version__,
        lifespan=lambda _app: _life_of(backends),
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # they would lead to whatever `Host` says
    )
    _guard(app, metrics, settings)
    routes = OpenAIRoutes(backends, settings.answer_tokens, settings.client_answers)
    app.include_router(routes.router())
    app.include_router(other_routes(list(backends.values()), metrics))
    install(app)
    return app


@asynccontextmanager
async def _life_of(backends: Mapping[str, Backend]) -> AsyncIterator[None]:
    model, *_ = backends.values()
    await model.ready()
    yield
    for backend in backends.values():
        await backend.stop()


def _guard(app: FastAPI, metrics: Metrics, settings: Settings) -> None:
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


def other_routes(backends: Sequence[Backend], metrics: Metrics) -> APIRouter:
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
        backend = backends[0]
        capacity = backend.capacity
        response.status_code = 200 if backend.alive else 503
        return schema.Health(
            status="ok" if backend.alive else "failed",
            running=capacity.running,
            waiting=capacity.waiting,
        )

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def show_metrics() -> Response:
        """Tell Prometheus."""
        answers = sum(one.capacity.unended for one in backends)
        metrics.stands([one.activity for one in backends], answers)
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


_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    401: {"model": schema.ErrorReply},
}
