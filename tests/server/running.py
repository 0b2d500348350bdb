"""A server on a free port of this machine, and decoders that write what a test wants."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import Any

import openai

from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.scheduling.decoder import Decoder, LocalDecoder
from pasta_decoding.server.app import create_app
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.listen import Server, http_server, open_socket
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.schema import ErrorReply
from pasta_decoding.server.settings import LoadLimits, Settings
from tests.remote.fake import until
from tests.scripted import Script, ScriptedEngine, follow

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
    def text(self) -> str:
        """The text of the first choice of a chat, streamed or plain."""
        assert self.status == 200, self.body
        if not self.body.startswith(b"data: "):
            return str(self.json["choices"][0]["message"]["content"])
        *events, _done, _end = self.body.split(b"\n\n")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's shape."""
        reply = ErrorReply.model_validate_json(self.body, extra="forbid")
        return reply.error.model_dump()


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
        arguments: dict[str, Any] = {"api_key": "none", "max_retries": 0, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **arguments)

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> Reply:
        """Send one request; a body that is not bytes is sent as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        method = method or ("GET" if body is None else "POST")
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method, path, raw, all_headers)
            response = connection.getresponse()
            received_headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, received_headers, response.read())

    def metric(self, name: str) -> float:
        """Return the value of a metric by its name and labels, as they are printed."""
        for line in self.ask("/metrics").body.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise LookupError(name)

    def wait_until_idle(self) -> None:
        """Wait until no answer is left and the cache holds prompts only."""
        until(lambda: self.backend.unended == 0)
        engine = self.decoder.engine
        until(lambda: engine.slots_in_use == self.backend.activity.kept_slots)


@contextmanager
def running(
    decoder: LocalDecoder,
    baseline: Callable[[], LocalDecoder] | None = None,
    *,
    served_decoder: Decoder | None = None,
    model: str = MODEL,
    max_requests: int = 8,
    max_queue: int = 64,
    drain_seconds: float = 5.0,
    **settings: Any,
) -> Iterator[Running]:
    """Serve a decoder, and perhaps a baseline, until the block ends.

    served_decoder: served in the place of `decoder`, for a decoder of another type.
    """
    metrics = Metrics()
    listener = open_socket("127.0.0.1", 0)
    backend = Backend(
        lambda: served_decoder or decoder, metrics, LoadLimits(max_requests, max_queue)
    )
    backends = {model: backend}
    if baseline is not None:
        backends[BASELINE] = Backend(baseline, metrics, LoadLimits())
    app = create_app(backends, metrics, Settings(**settings))
    server = http_server(app, list(backends.values()), drain_seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(listener.getsockname()[1], decoder, backend, server)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def head(length: int) -> bytes:
    """Return the head of a request with a body, for tests that send a wrong body."""
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


# Decoders with the tiny checkpoint's tokenizer


STEP_S = 0.005


class Hooked(ScriptedEngine):
    """Calls `hook` with the number of steps made before each further one."""

    hook: Callable[[int], object]

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        self.hook(len(self.steps))
        return super().step(feeds)


def slow(_steps: int) -> None:
    """Take some time for each step."""
    time.sleep(STEP_S)


def with_engine(
    decoder: LocalDecoder, script: Script, hook: Callable[[int], object] = lambda _: None
) -> LocalDecoder:
    """Return `decoder` over a scripted engine."""
    engine = Hooked(script, decoder.engine.vocabulary_size, max_slots=8192)
    engine.hook = hook
    return replace(decoder, engine=engine)


def ids(decoder: LocalDecoder, text: str) -> tuple[int, ...]:
    return tuple(decoder.encoder.encode_text(text))


def endless(decoder: LocalDecoder, hook: Callable[[int], object] = slow) -> LocalDecoder:
    """Return `decoder` over an engine that writes the letter a for ever."""
    a = ids(decoder, "a")[0]
    return with_engine(
        decoder, follow(vocabulary_size=decoder.engine.vocabulary_size, otherwise=a), hook
    )


def saying(
    decoder: LocalDecoder,
    before: str = "One: ",
    topic: str = "fruit",
    chunk: str = "an apple",
    after: str = " Done.",
) -> Script:
    """Write `before`, promise a chunk, wait for it, write `after`."""
    control = decoder.vocabulary.control
    bucket = min(control.promise_close.values())
    end = min(decoder.vocabulary.eos_ids)
    promise = (control.promise_open, *ids(decoder, topic), bucket)
    main = (*ids(decoder, f"assistant\n{before}"), *promise, control.sync)
    rest = (*ids(decoder, after), end)
    return follow(
        main,
        (bucket, control.async_open, *ids(decoder, chunk), control.async_close),
        (control.sync, *rest),
        vocabulary_size=decoder.engine.vocabulary_size,
        otherwise=end,
    )
