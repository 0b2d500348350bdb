"""A client that leaves takes everything with it; what is broken off is told."""

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from threading import Semaphore
from typing import Any

import openai
import pytest

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.server.backend import Answers, Backend
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import LoadLimits
from tests.remote.fake import until
from tests.scripted import shuffled
from tests.server.running import (
    CHAT,
    GOOD,
    Reply,
    Running,
    endless,
    head,
    running,
    slow,
    with_engine,
)

TOKENS = 2000
LONG: dict[str, Any] = GOOD | {"max_tokens": TOKENS}


def test_a_cancelled_answer_is_freed_within_one_step(decoder: LocalDecoder) -> None:
    permits = Semaphore(6)
    begun_steps: list[int] = []

    def hook(steps: int) -> None:
        begun_steps.append(steps)
        permits.acquire()

    stepped = endless(decoder, hook)
    request = stepped.request("Hello", Rules(max_tokens=500), SamplingParams())
    engine = stepped.engine

    async def leave_after_some_text() -> None:
        backend = Backend(lambda: stepped, Metrics(), LoadLimits())
        await backend.ready()
        with closing(backend.submit([request, request])) as answers:
            pieces = aiter(answers)
            for _ in range(4):
                await anext(pieces)
            await asyncio.to_thread(until, lambda: len(begun_steps) == 7)
            assert engine.slots_in_use > 0
        # The engine waits inside its seventh step; it may finish that one, and begins no other.
        permits.release()
        await asyncio.to_thread(until, lambda: engine.slots_in_use == 0)
        assert (len(begun_steps), backend.unended) == (7, 0)
        await backend.stop()

    asyncio.run(leave_after_some_text())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_answer(stream: bool, decoder: LocalDecoder) -> None:
    steps = list[int]()

    def counted(n: int) -> None:
        steps.append(n)
        slow(n)

    with running(endless(decoder, counted)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            raw = json.dumps(LONG | {"stream": stream}).encode()
            client.sendall(head(len(raw)) + raw)
            until(lambda: len(steps) > 5)
        server.wait_until_idle()
        assert len(steps) < TOKENS / 2
        assert server.metric('pasta_answers_total{end="cancelled"}') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_breaks_fails_who_was_there_and_nobody_after(
    stream: bool, decoder: LocalDecoder
) -> None:
    errors = iter([None] * 5 + [RuntimeError("the device is gone")])

    def broken(_steps: int) -> None:
        if error := next(errors, None):
            raise error

    with running(endless(decoder, broken)) as server:
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(server.client().chat.completions.create(**GOOD, stream=stream))
        list(server.client().chat.completions.create(**GOOD, stream=stream))
        assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.filterwarnings("ignore:Exception in thread pasta-engine")
def test_an_engine_that_dies_is_503_for_those_who_wait_and_for_those_who_come(
    decoder: LocalDecoder,
) -> None:
    def deadly(steps: int) -> None:
        if steps == 5:
            raise SystemExit  # it ends its thread

    with running(endless(decoder, deadly), max_requests=2) as server:
        for stream in (False, True):
            got = server.ask(CHAT, LONG | {"n": 3, "stream": stream})
            assert (got.status, got.error["code"]) == (503, "engine_stopped")
        server.wait_until_idle()
        health = server.ask("/health")
        assert health.json == {"status": "failed", "running": 0, "waiting": 0}
        assert health.status == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_is_told_to_stop_tells_its_clients(
    stream: bool, decoder: LocalDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    body = LONG | {"stream": stream, "n": 2}  # one is written, one waits
    with running(endless(decoder), max_requests=1, drain_seconds=0.3) as server:
        with ThreadPoolExecutor(1) as client:
            reply: Future[Reply] = client.submit(server.ask, CHAT, body)
            until(lambda: server.decoder.engine.slots_in_use > 0)
            server.http.should_exit = True
            got = reply.result()
        if stream:
            assert got.status == 200
            *_, error, done, _ = got.body.split(b"\n\n")
            assert done == b"data: [DONE]"
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "server_stopping"
        else:
            assert (got.status, got.error["code"]) == (503, "server_stopping")
            assert int(got.headers["retry-after"]) > 0
        until(lambda: server.backend.unended == 0)  # the last bytes leave before the answers close
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_clients_learn_of_the_stop_while_a_step_takes_long(
    decoder: LocalDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    def hook(_steps: int) -> None:
        stepping.set()
        go_on.wait(60)

    with (
        running(endless(decoder, hook), drain_seconds=0.1) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        asked = [
            pool.submit(server.ask, CHAT, LONG | {"stream": stream}) for stream in [True, False] * 6
        ]
        assert stepping.wait(60)
        until(lambda: server.backend.unended == 12)
        server.http.should_exit = True
        replies = [reply.result(timeout=30) for reply in asked]
        go_on.set()
    assert all(b"server_stopping" in reply.body for reply in replies)
    assert {reply.status for reply in replies} == {200, 503}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_silent_stream_says_what_it_waits_for(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "silence_s", 0.1)
    go_on = threading.Event()
    body = GOOD | {"stream": True}
    with (
        running(endless(decoder, lambda _: go_on.wait(60)), max_requests=1) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(server.ask, CHAT, body)
        until(lambda: server.backend.unended == 1)
        second = pool.submit(server.ask, CHAT, body)
        until(lambda: server.backend.unended == 2)
        time.sleep(0.5)
        go_on.set()
        assert b"\n\n: reading the prompt\n\n" in first.result().body
        assert b"\n\n: waiting in the queue, place 1\n\n" in second.result().body
        go_on.clear()
        chunks = server.client().chat.completions.create(**GOOD, stream=True)
        first_chunk = next(chunks)
        time.sleep(0.3)
        go_on.set()
        contents = [chunk.choices[0].delta.content or "" for chunk in [first_chunk, *chunks]]
        assert "".join(contents) == "aaaaa"


# Many clients, many of whom leave


PROMPTS = ["Hello", "What now?", "Count.", "And then?"]
NONSENSE = [b"{", b"[]", b'{"model": "tiny"}', b'{"messages": 1}', b"\xff\xfe", b""]


@pytest.mark.parametrize("requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scripted", [True, False])
def test_random_disconnects_and_timeouts_leave_nothing_behind(
    requests: int, scripted: bool, decoder: LocalDecoder
) -> None:
    if scripted:
        decoder = with_engine(decoder, shuffled(decoder.engine.vocabulary_size))
    expected = {}
    for prompt in PROMPTS:
        request = decoder.request(prompt, Rules(max_tokens=24), SamplingParams())
        expected[prompt] = decoder.answer(request).text
    threads = threading.active_count()
    ends: Counter[str] = Counter()
    with running(decoder, max_requests=4, max_queue=6) as server:
        with ThreadPoolExecutor(16) as pool:
            for quarter in range(4):
                numbers = range(quarter, requests, 4)
                ends.update(pool.map(lambda number: visit(server, number, expected), numbers))
                server.wait_until_idle()
        assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}
        for gauge in ("live_threads", "queue", "running", "cache_cells"):
            assert server.metric(f"pasta_{gauge}") == 0
    assert threading.active_count() == threads
    assert ends.total() == requests
    assert all(ends[end] > 0 for end in ("right", "left", "refused"))


def visit(server: Running, number: int, expected: Mapping[str, str]) -> str:
    """Ask; then stay to the end, or leave early, or have no patience, or ask for nonsense."""
    chance = random.Random(number)
    prompt = chance.choice(list(expected))
    stream = chance.random() < 0.6
    question = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    body = json.dumps(GOOD | question | {"stream": stream}).encode()
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
