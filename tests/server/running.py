"""A server on a free port of this machine, over a tiny model, for as long as a test needs it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import openai

from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.server.app import create_app
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.listen import Server, http_server, open_socket
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load, Settings

MODEL = "tiny"
BASELINE = "taught"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0}


@dataclass(frozen=True)
class Reply:
    """An HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return dict(error)


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    port: int
    decoder: LocalDecoder
    backend: Backend
    http: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> openai.OpenAI:
        given: dict[str, Any] = {"api_key": "none", "max_retries": 0, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> Reply:
        """Send one request; a body that is not bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(
                method or ("GET" if body is None else "POST"),
                path,
                raw,
                {"Content-Type": "application/json"} | named,
            )
            got = connection.getresponse()
            found = {name.lower(): value for name, value in got.getheaders()}
            return Reply(got.status, found, got.read())
        finally:
            connection.close()

    def metric(self, line: str) -> float:
        """Return a metric by all that stands before its value."""
        lines = self.ask("/metrics").body.decode().splitlines()
        return next(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{line} "))

    def wait_until_idle(self) -> None:
        """Wait until nothing is held and nobody is waiting; fails if that does not come."""
        wait_for(lambda: self.backend.unended == 0)
        engine = self.decoder.engine
        wait_for(lambda: engine.slots_in_use == self.backend.activity.kept_cells)


def wait_for(holds: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Wait for something that is about to happen. The limit is for what never comes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@contextmanager
def running(
    decoder: LocalDecoder,
    backends: Mapping[str, Backend] | None = None,
    *,
    model: str = MODEL,
    max_requests: int = 8,
    max_queue: int = 64,
    drain_seconds: float = 5.0,
    **settings: Any,
) -> Iterator[Running]:
    """Serve `decoder` until the block ends, or several backends, the first of them its own."""
    if backends is None:
        backends = {model: Backend(lambda: decoder, Metrics(), Load(max_requests, max_queue))}
    backend, *_ = several = list(backends.values())
    listener = open_socket("127.0.0.1", 0)
    app = create_app(backends, backend.metrics, Settings(**settings))
    server = http_server(app, several, drain_seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Running(listener.getsockname()[1], decoder, backend, server)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def request_bytes(body: dict[str, Any]) -> bytes:
    """A whole HTTP request, for clients that do not behave."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def with_baseline(
    own: Callable[[], LocalDecoder], baseline: Callable[[], LocalDecoder]
) -> Mapping[str, Backend]:
    """Return the backends of a model and its sequential baseline."""
    metrics = Metrics()
    return {MODEL: Backend(own, metrics, Load()), BASELINE: Backend(baseline, metrics, Load())}
