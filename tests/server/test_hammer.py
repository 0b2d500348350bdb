"""Many clients, many of whom leave: nothing leaks, and a client that stays gets its answer."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from pasta_decoding.engines.scripted import shuffled
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from tests.server.running import CHAT, GOOD, Reply, Running, running
from tests.server.scripts import with_engine

TOKENS = 24
PROMPTS = ["Hello", "What now?", "Count.", "And then?"]
CONNECTIONS = 16
QUARTERS = 4
NONSENSE = [b"{", b"[]", b'{"model": "tiny"}', b'{"messages": 1}', b"\xff\xfe", b""]


@pytest.mark.parametrize("requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scripted", [True, False])
def test_random_disconnects_and_timeouts_leave_nothing_behind(
    requests: int, scripted: bool, decoder: LocalDecoder
) -> None:
    if scripted:
        decoder = with_engine(decoder, shuffled(decoder.engine.vocabulary_size))
    rules, sampling = Rules(max_tokens=TOKENS), SamplingParams()
    alone = {one: decoder.answer(decoder.request(one, rules, sampling)).text for one in PROMPTS}
    threads, ends = threading.active_count(), Counter[str]()
    with running(decoder, max_requests=4, max_queue=6) as server:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for quarter in range(QUARTERS):
                numbers = range(quarter, requests, QUARTERS)
                ends.update(pool.map(lambda number: visit(server, number, alone), numbers))
                server.wait_until_idle()
        assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}
        for held in ("live_threads", "queue", "running", "cache_cells"):
            assert server.metric(f"pasta_{held}") == 0
    assert threading.active_count() == threads
    assert ends.total() == requests
    assert all(ends[end] > 0 for end in ("right", "left", "refused"))


def visit(server: Running, number: int, expected: Mapping[str, str]) -> str:
    """Ask; then stay to the end, or leave early, or have no patience, or ask for nonsense."""
    chance = random.Random(number)
    prompt, stream = chance.choice(list(expected)), chance.random() < 0.6
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}
    body = json.dumps(GOOD | asked | {"stream": stream}).encode()
    if chance.random() < 0.1:
        body = chance.choice(NONSENSE)
    patience_s = chance.choice([60.0, 60.0, 0.02])
    connection = HTTPConnection("127.0.0.1", server.port, timeout=patience_s)
    try:
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        if chance.random() < 0.2:
            return "left"
        got = connection.getresponse()
        if got.status != 200:
            code = Reply(got.status, {}, got.read()).error["code"]
            assert (got.status == 400) == (body in NONSENSE)
            assert got.status == 400 or (got.status, code) == (429, "queue_full")
            return "refused" if got.status == 400 else "busy"
        if stream and chance.random() < 0.3:
            got.read(chance.randrange(1, 2000))
            return "left"
        assert Reply(200, {}, got.read()).text == expected[prompt]
    except TimeoutError:
        return "timed out"
    finally:
        connection.close()
    return "right"
