"""What the server adds to the engine alone, one client, answer by answer; and that it adds no byte.

    python bench/serve_overhead.py --engines llama:F16 --limit 50

Each prompt is answered by the engine alone, by a plain reply and by a stream, in an order that
turns round from prompt to prompt. Server and client live in this process, beside the engine, so
that all three decode with the same weights and cache; what the client costs counts against the
server. First text is the first that can be shown in reading order; where text comes behind a
chunk, all three wait for it alike. Processor seconds are told beside the clock's: they do not care
what else runs on the machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles

from common import SAMPLE, arguments, decoder_named, emit, spread
from rich.console import Console
from rich.progress import track

from pasta_decoding.data.questions import read_questions
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.runtime.stop_filter import StopFilter
from pasta_decoding.server.app import create_app
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.listen import http_server, open_socket
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load, Settings

NAME = "model"


@dataclass(frozen=True, slots=True)
class Came:
    """An answer as whoever asked got it.

    first_s: when its first text came.
    cpu_s:   what this process computed meanwhile, all its threads together.
    """

    text: str
    first_s: float
    seconds: float
    cpu_s: float


Way = Callable[[str], Came]
"""One way to an answer: the engine alone, a plain reply, or a stream."""


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(engines=["llama:F16"])
    parser.add_argument("--prompts", type=Path, default=SAMPLE, help="JSONL with `instruction`s")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    prompts = [one.instruction for one in read_questions(options.prompts)][: options.limit]
    differing = 0
    for name in options.engines:
        decoder = decoder_named(name, options)
        with serving(decoder) as port:
            rounds = list(answered(decoder, port, prompts, options.max_tokens))
        differing += report(decoder.engine.name, options.max_tokens, rounds)
    sys.exit(f"{differing} answers are not the engine's own" if differing else 0)


@contextmanager
def serving(decoder: LocalDecoder) -> Iterator[int]:
    """Serve until the block ends; yields the port."""
    metrics = Metrics()
    backend = Backend(lambda: decoder, metrics, Load())
    app = create_app({NAME: backend}, metrics, Settings())
    listener = open_socket("127.0.0.1", 0)
    server = http_server(app, [backend])
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def answered(
    decoder: LocalDecoder, port: int, prompts: Sequence[str], max_tokens: int
) -> Iterator[dict[str, Came]]:
    """Yield what came of each prompt, by each way; the first prompt warms all of them up."""
    ways = ways_to(decoder, port, max_tokens)
    for way in ways.values():
        way(prompts[0])
    names = list(ways)
    shown = track(prompts, decoder.engine.name, console=Console(stderr=True), transient=True)
    for number, prompt in enumerate(shown):
        turn = number % len(names)
        yield {name: ways[name](prompt) for name in names[turn:] + names[:turn]}


def ways_to(decoder: LocalDecoder, port: int, max_tokens: int) -> dict[str, Way]:
    """Return the three ways to an answer."""
    rules = Rules(max_tokens=max_tokens)

    def alone(prompt: str) -> Came:
        began_s = time.perf_counter()
        return came(began_s, _alone(decoder, prompt, rules))

    def plain(prompt: str) -> Came:
        began_s = time.perf_counter()
        return came(began_s, _plain(port, _body(prompt, max_tokens, stream=False)))

    def stream(prompt: str) -> Came:
        began_s = time.perf_counter()
        return came(began_s, _streamed(port, _body(prompt, max_tokens, stream=True)))

    return {"alone": alone, "plain": plain, "stream": stream}


def came(began_s: float, pieces: Iterable[str]) -> Came:
    """Take an answer in."""
    text, first_s, began_cpu_s = "", 0.0, time.process_time()
    for piece in pieces:
        if piece and not text:
            first_s = time.perf_counter() - began_s
        text += piece
    seconds = time.perf_counter() - began_s
    return Came(text, first_s, seconds, time.process_time() - began_cpu_s)


def _alone(decoder: LocalDecoder, prompt: str, rules: Rules) -> Iterator[str]:
    visible = StopFilter()
    for event in decoder.decode(decoder.request(prompt, rules, SamplingParams())):
        yield visible.feed([event])
    yield visible.finish()


def _body(prompt: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": NAME, "messages": messages, "max_tokens": max_tokens}
    return json.dumps({**body, "temperature": 0, "stream": stream}).encode()


def _plain(port: int, body: bytes) -> Iterator[str]:
    with _posted(port, body) as lines:
        yield json.loads(b"".join(lines))["choices"][0]["message"]["content"]


def _streamed(port: int, body: bytes) -> Iterator[str]:
    with _posted(port, body) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content", "")


@contextmanager
def _posted(port: int, body: bytes) -> Iterator[Iterator[bytes]]:
    """Post a request on a connection of its own; yields the lines of the reply as they come."""
    connection = HTTPConnection("127.0.0.1", port)
    try:
        path, headers = "/v1/chat/completions", {"Content-Type": "application/json"}
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        yield iter(reply.readline, b"")
    finally:
        connection.close()


def report(engine: str, max_tokens: int, rounds: Sequence[dict[str, Came]]) -> int:
    """Print one line, and return how many prompts got different answers.

    Every ratio is of one prompt, to the engine alone.
    """
    alone = [one["alone"] for one in rounds]
    differing = sum(len({came.text.encode() for came in one.values()}) > 1 for one in rounds)
    over: dict[str, object] = {}
    for way in ("plain", "stream"):
        pairs = [(one[way], one["alone"]) for one in rounds]
        over[f"{way}_seconds"] = ratio([there.seconds / here.seconds for there, here in pairs])
        over[f"{way}_cpu_seconds"] = ratio([there.cpu_s / here.cpu_s for there, here in pairs])
    firsts = [one["stream"].first_s / one["alone"].first_s for one in rounds if one["alone"].text]
    emit(
        "serve_overhead",
        engine=engine,
        answers=len(rounds),
        max_tokens=max_tokens,
        differing=differing,
        over_the_engine_alone={**over, "stream_first_text": ratio(firsts)},
        alone_s=spread([one.seconds for one in alone], 3),
        alone_first_text_s=spread([one.first_s for one in alone], 4),
    )
    return differing


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles around it."""
    low, middle, high = quantiles(values, n=4)
    return {"q1": round(low, 4), "median": round(middle, 4), "q3": round(high, 4)}


if __name__ == "__main__":
    main()
