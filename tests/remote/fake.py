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
"""(body, pieces of a good reply) -> the pieces or the response to send in their place."""


def by_model(model: PreTrainedModel) -> Script:
    """Return the logits of a plain causal forward over everything, without any cache."""

    def script(seen: tuple[int, ...]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([seen]), use_cache=False).logits[0, -1].numpy()

    return script


@dataclass(eq=False)
class Fake:
    """A server's settings, and the requests that it has seen.

    bodies:    the requests for completions, each with the session that its header names.
    checks:    the requests that only check whether the server has Pasta's logits processor.
    live:      requests for completions that are under way.
    max_live:  the largest value of `live` up to now.
    processor: makes the logits processor of a request; None: the server has none.
    adapted:   makes a script of an adapter's folder; None: the server loads no adapters.
    calls:     the requests to load or unload an adapter: (action, name).
    token_s:   the time that a token takes.
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
    max_live: int = 0
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
        body = await request.json()
        action = request.path_params["action"]
        if self.adapted is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        name = body["lora_name"]
        self.calls.append((action, name))
        self.adapters.pop(name, None)
        if action == "load":
            self.adapters[name] = self.adapted(Path(body["lora_path"]))
        return Response()

    async def complete(self, request: Request) -> Response:
        body = await request.json() | {"session": request.headers.get("x-session-id")}
        is_check = '"kind":"check"' in (body.get("vllm_xargs") or {}).get(XARG, "")
        prompt = body["prompt"][:-1]
        prefixes = [commonprefix([prompt, earlier["prompt"]]) for earlier in self.bodies]  # noqa: RUF071
        cached_tokens = max(map(len, prefixes), default=0)
        if is_check:
            self.checks.append(body)
        else:
            self.bodies.append(body)
        if not self._may(request):
            return refusal(401, "Unauthorized")
        if body["model"] not in (self.model, *self.adapters):
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if problem := self.problem(body):
            return refusal(400, problem)
        pieces = self._pieces(body, cached_tokens, 0 if is_check else 1)
        reply: AsyncIterator[bytes] | Response = pieces
        if self.mischief and not is_check:
            reply = self.mischief(body, pieces)
        if isinstance(reply, Response):
            return reply
        return StreamingResponse(_closing(reply, pieces), media_type="text/event-stream")

    def _may(self, request: Request) -> bool:
        return self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"

    def problem(self, body: Body) -> str | None:
        prompt = body["prompt"]
        bias = body["logit_bias"] or {}
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

    async def _pieces(self, body: Body, cached_tokens: int, requests: int) -> AsyncGenerator[bytes]:
        prompt = body["prompt"]
        written: list[int] = []
        finish_reason = None
        max_tokens = min(body["max_tokens"], self.max_model_len - len(prompt))
        processor = None if self.processor is None else self.processor()
        if processor is not None:
            processor.update(change(added=[(0, _params(body), None, written)]))
        self.live += requests
        self.max_live = max(self.max_live, self.live)
        try:
            while finish_reason is None:
                await asyncio.sleep(self.token_s)
                token = self._choose(body, written, processor)
                prompt_field = {} if written else {"prompt_token_ids": prompt}
                written.append(token)
                is_end = token in (*body["stop_token_ids"], self.end)
                if is_end:
                    finish_reason = "stop"
                elif len(written) == max_tokens:
                    finish_reason = "length"
                stop_reason = token if is_end and token != self.end else None
                yield event(
                    token, finish_reason=finish_reason, stop_reason=stop_reason, **prompt_field
                )
            yield usage(len(prompt), len(written), cached_tokens)
            yield b"data: [DONE]\n\n"
        finally:
            self.live -= requests

    def _choose(self, body: Body, written: list[int], processor: GuidedRows | None) -> int:
        script = self.adapters.get(body["model"], self.script)
        logits_V = np.array(script((*body["prompt"], *written)), dtype=np.float64)
        for token, bias in (body["logit_bias"] or {}).items():
            logits_V[int(token)] += bias
        if processor is not None:
            logits_V = processor.apply(torch.from_numpy(logits_V)[None])[0].numpy()
        if body["temperature"]:
            noise = np.random.default_rng((body["seed"], len(written)))
            logits_V = logits_V / body["temperature"] + noise.gumbel(size=len(logits_V))
        return int(logits_V.argmax())


def _params(body: Body) -> Any:
    """Return vLLM's sampling params of a body: the two fields that a logits processor reads."""
    return SimpleNamespace(extra_args=body.get("vllm_xargs"), temperature=body["temperature"])


async def _closing(
    reply: AsyncIterator[bytes], pieces: AsyncGenerator[bytes]
) -> AsyncIterator[bytes]:
    """Yield `reply`, which is made from `pieces`, and close `pieces` as soon as it ends."""
    async with aclosing(pieces):
        async for piece in reply:
            yield piece


def event(*ids: int, **fields: Any) -> bytes:
    """Return an event with these token ids; `fields` replace those of its choice."""
    choice = {"index": 0, "text": "".join(map(chr, ids)), "token_ids": list(ids), **fields}
    return data_line({"choices": [{"finish_reason": None} | choice]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return data_line({"choices": [], "usage": counts | details})


def data_line(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def refusal(status: int, message: str) -> Response:
    """Return an error that may be tried again at once."""
    error = {"message": message, "type": "error"}
    return JSONResponse({"error": error}, status, {"Retry-After": "0"})


@cache
def _server() -> tuple[Starlette, int]:
    """Start the server of this process, at which every `Fake` has its own path."""
    app = Starlette()
    listener = open_socket("127.0.0.1", 0)
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
    """Send `words` to every client on a port of this machine, then `drip` until it hangs up."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):  # the client hangs up
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
    """Wait until a condition holds. Fails if it does not hold after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
