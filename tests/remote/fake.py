"""A server of completions as vLLM is one, over a script or a tiny model, on a port of this machine.

It speaks the dialect that `remote.stream` describes and refuses what vLLM refuses. `Mischief` makes
it misbehave.
"""

import asyncio
import json
import socketserver
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from transformers import PreTrainedModel

from pasta_decoding.answer.guided import XARG
from pasta_decoding.errors import PastaError
from pasta_decoding.remote.stream import MAX_BIASES
from pasta_decoding.server.listen import open_socket
from pasta_decoding.vllm.batch import GuidedRows, guided_params_of
from tests.scripted import Script
from tests.vllm.tokens import change

Body = dict[str, Any]
Mischief = Callable[[Body, AsyncIterator[bytes]], AsyncIterator[bytes] | Response]
"""What is sent in place of a good reply: other pieces, or another response."""


def by_model(model: PreTrainedModel) -> Script:
    """Return the logits of a plain causal forward over everything, without any cache."""

    def script(seen: tuple[int, ...]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([seen]), use_cache=False).logits[0, -1].numpy()

    return script


@dataclass(eq=False)
class Fake:
    """What the server does, and what it has seen.

    bodies:    all requests for completions, each with the session that its header names; `live`
               of them are under way.
    checks:    those that only ask what the server can do.
    processor: makes what holds requests to their params, as vLLM does; None has none.
    adapted:   makes a script of an adapter's folder; None loads none. `calls` are for these.
    token_s:   how long it takes for a token.
    """

    script: Script
    vocabulary_size: int
    end: int
    model: str = "tiny"
    max_model_len: int = 4096
    key: str | None = None
    token_s: float = 0.0
    processor: Callable[[], GuidedRows] | None = None
    adapted: Callable[[Path], Script] | None = None
    adapters: dict[str, Script] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    checks: list[Body] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    mischief: Mischief | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{id(self)}/v1"

    async def models(self, request: Request) -> Response:
        if not self._may(request):
            return refusal(401, "Unauthorized")
        model = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        adapters = [{"id": name, "parent": self.model} for name in self.adapters]
        return JSONResponse({"object": "list", "data": [model, *adapters]})

    async def adapt(self, request: Request) -> Response:
        body, action = await request.json(), request.path_params["action"]
        if self.adapted is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        self.calls.append((action, name := body["lora_name"]))
        self.adapters.pop(name, None)
        if action == "load":
            self.adapters[name] = self.adapted(Path(body["lora_path"]))
        return Response()

    async def complete(self, request: Request) -> Response:
        body = await request.json() | {"session": request.headers.get("x-session-id")}
        check = '"kind":"check"' in (body.get("vllm_xargs") or {}).get(XARG, "")
        prompt = body["prompt"][:-1]
        shared = [commonprefix([prompt, one["prompt"]]) for one in self.bodies]  # noqa: RUF071
        (self.checks if check else self.bodies).append(body)
        if not self._may(request):
            return refusal(401, "Unauthorized")
        if body["model"] not in (self.model, *self.adapters):
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if problem := self.problem(body):
            return refusal(400, problem)
        pieces = self._pieces(body, max(map(len, shared), default=0), 0 if check else 1)
        found = self.mischief(body, pieces) if self.mischief and not check else pieces
        if isinstance(found, Response):
            return found
        return StreamingResponse(_closing(found, pieces), media_type="text/event-stream")

    def _may(self, request: Request) -> bool:
        return self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"

    def problem(self, body: Body) -> str | None:
        prompt, bias = body["prompt"], body["logit_bias"] or {}
        if max(len(prompt) + 1, body["max_tokens"]) > self.max_model_len:
            return f"This model's maximum context length is {self.max_model_len} tokens."
        ids = [*prompt, *map(int, bias)]
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            return "token_id(s) that are not in the vocabulary"
        try:
            _ = self.processor and guided_params_of(_params(body))
        except PastaError as error:
            return f"pasta-decoding: {error}"
        return "Too many logit bias tokens" if len(bias) > MAX_BIASES else None

    async def _pieces(self, body: Body, cached: int, requests: int) -> AsyncGenerator[bytes]:
        prompt, written, reason = body["prompt"], list[int](), None
        most = min(body["max_tokens"], self.max_model_len - len(prompt))
        held = None if self.processor is None else self.processor()
        if held is not None:
            held.update(change(added=[(0, _params(body), None, written)]))
        self.live += requests
        self.most_live = max(self.most_live, self.live)
        try:
            while reason is None:
                await asyncio.sleep(self.token_s)
                token = self._choose(body, written, held)
                first = {} if written else {"prompt_token_ids": prompt}
                written.append(token)
                stopped = token in (*body["stop_token_ids"], self.end)
                reason = "stop" if stopped else "length" if len(written) == most else None
                named = token if stopped and token != self.end else None
                yield event(token, finish_reason=reason, stop_reason=named, **first)
            yield usage(len(prompt), len(written), cached)
            yield b"data: [DONE]\n\n"
        finally:
            self.live -= requests

    def _choose(self, body: Body, written: list[int], held: GuidedRows | None) -> int:
        script = self.adapters.get(body["model"], self.script)
        logits_V = np.array(script((*body["prompt"], *written)), dtype=np.float64)
        for token, by in (body["logit_bias"] or {}).items():
            logits_V[int(token)] += by
        if held is not None:
            logits_V = held.apply(torch.from_numpy(logits_V)[None])[0].numpy()
        if body["temperature"]:
            noise = np.random.default_rng((body["seed"], len(written)))
            logits_V = logits_V / body["temperature"] + noise.gumbel(size=len(logits_V))
        return int(logits_V.argmax())


def _params(body: Body) -> Any:
    """What vLLM makes of a body, as far as a processor looks at it."""
    return SimpleNamespace(extra_args=body.get("vllm_xargs"), temperature=body["temperature"])


async def _closing(
    found: AsyncIterator[bytes], pieces: AsyncGenerator[bytes]
) -> AsyncIterator[bytes]:
    """End `pieces` with what was made of them, not when they are collected as garbage."""
    async with aclosing(pieces):
        async for piece in found:
            yield piece


def event(*ids: int, **about: Any) -> bytes:
    """Return an event that brings these ids."""
    choice = {"index": 0, "text": "".join(map(chr, ids)), "token_ids": list(ids), **about}
    return sent({"choices": [{"finish_reason": None} | choice]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return sent({"choices": [], "usage": counts | details})


def sent(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def refusal(status: int, message: str) -> Response:
    """Return an error that may be tried again at once."""
    error = {"message": message, "type": "error"}
    return JSONResponse({"error": error}, status, {"Retry-After": "0"})


@cache
def _server() -> tuple[Starlette, int]:
    """Start the one server of this process, at which every fake has a path of its own."""
    app, listener = Starlette(), open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    run = partial(server.run, sockets=[listener])
    threading.Thread(target=run, daemon=True).start()
    return app, listener.getsockname()[1]


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serve until the block ends."""
    app, fake.port = _server()
    completions = Route("/v1/completions", fake.complete, methods=["POST"])
    adapters = Route("/v1/{action}_lora_adapter", fake.adapt, methods=["POST"])
    models = Route("/v1/models", fake.models)
    mount = Mount(f"/{id(fake)}", routes=[models, completions, adapters])
    app.router.routes.append(mount)
    try:
        yield fake
    finally:
        app.router.routes.remove(mount)


@contextmanager
def hanging_up(words: bytes, drip: bytes = b"") -> Iterator[int]:
    """Say `words` to whoever comes, on a port of this machine, then `drip` for ever."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):  # until nobody listens
                self.request.sendall(words)
                while drip:
                    self.request.sendall(drip)
                    time.sleep(0.02)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def until(holds: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Wait for something that is about to happen. The limit is for what never comes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
