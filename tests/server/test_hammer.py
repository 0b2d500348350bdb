"""Many clients, many of whom leave: nothing leaks, and who stays gets the right answer."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from pasta_decoding.engines.scripted import shuffled
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from tests.server.running import MODEL, Running, running
from tests.server.scripts import with_engine

CONNECTIONS = 16
TOKENS = 24
PROMPTS = ["Hello", "What now?", "Count.", "And then?"]


@pytest.mark.parametrize(
    "requests", [150, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.timeout(200)
def test_random_disconnects_and_timeouts_leave_nothing_behind(
    requests: int, decoder: Decoder
) -> None:
    scripted = with_engine(decoder, shuffled(decoder.engine.vocabulary_size))
    rules = Rules(max_tokens=TOKENS)
    expected = {
        prompt: scripted.answer(scripted.request(prompt, rules, Sampling())).text
        for prompt in PROMPTS
    }
    before = threading.active_count()
    with running(scripted, at_once=4, queue=6) as server:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            ends = list(pool.map(lambda n: _behave_badly(server, n, expected), range(requests)))
        server.wait_until_idle()
        assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}
        assert server.metric("pasta_live_threads") == 0
        assert server.metric("pasta_queue") == 0
        assert server.metric("pasta_cache_cells") == 0
        assert _whole(server, "Hello") == expected["Hello"]
    assert threading.active_count() == before
    assert {"right", "left", "busy"} <= set(ends)
    assert set(ends) <= {"right", "left", "busy", "timed out"}


def _behave_badly(server: Running, number: int, expected: dict[str, str]) -> str:
    """Ask; then stay to the end, or leave early, or have no patience."""
    chance = random.Random(number)
    prompt = chance.choice(PROMPTS)
    stream = chance.random() < 0.6
    patience_s = chance.choice([30.0, 30.0, 0.02])
    connection = HTTPConnection("127.0.0.1", server.port, timeout=patience_s)
    try:
        connection.request("POST", "/v1/chat/completions", _body(prompt, stream), _JSON)
        if chance.random() < 0.2:
            return "left"
        got = connection.getresponse()
        if got.status == 429:
            assert json.loads(got.read())["error"]["code"] == "queue_full"
            return "busy"
        assert got.status == 200
        if stream and chance.random() < 0.3:
            got.read(chance.randrange(1, 2000))
            return "left"
        text = _streamed_text(got.read()) if stream else _text(got.read())
        assert text == expected[prompt]
    except TimeoutError:
        return "timed out"
    finally:
        connection.close()
    return "right"


_JSON = {"Content-Type": "application/json"}


def _body(prompt: str, stream: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": TOKENS}
    return json.dumps(body | {"temperature": 0, "stream": stream}).encode()


def _text(raw: bytes) -> str:
    found: str = json.loads(raw)["choices"][0]["message"]["content"]
    return found


def _streamed_text(raw: bytes) -> str:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n")]
    chunks = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def _whole(server: Running, prompt: str) -> str:
    return _text(server.ask("/v1/chat/completions", _body(prompt, False)).body)
