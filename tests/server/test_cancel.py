"""A client that leaves takes everything with it; what is broken off is told."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from pasta_decoding.runtime.worker import ClosedError
from pasta_decoding.server.answers import AnswerError, Ask, Ended
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load
from tests.server.running import HELLO, MODEL, Reply, running, wait_for
from tests.server.scripts import Broken, Deadly, Slow, Stepped, endless, with_engine

LONG = 2000


def ask(decoder: LocalDecoder, tokens: int = LONG) -> Ask:
    return Ask(decoder.prompt_ids("Hello", tokens), Rules(max_tokens=tokens), Sampling())


def test_a_cancelled_answer_is_freed_within_one_step(decoder: LocalDecoder) -> None:
    stepped = with_engine(decoder, endless(decoder), Stepped)
    engine = stepped.engine
    assert isinstance(engine, Stepped)

    async def leave_after_some_text() -> None:
        backend = Backend(lambda: stepped, Metrics(), Load())
        await backend.ready()
        with backend.submit([ask(stepped, 500), ask(stepped, 500)]) as answers:
            engine.permits.release(6)
            pieces = aiter(answers)
            for _ in range(4):
                await anext(pieces)
            await asyncio.to_thread(wait_for, lambda: engine.begun == 7)
            assert engine.slots_in_use > 0
        # The engine waits inside its seventh step; it may finish that one, and begins no other.
        engine.permits.release(1)
        await asyncio.to_thread(wait_for, lambda: engine.slots_in_use == 0)
        assert engine.begun == len(engine.steps) == 7
        assert backend.capacity.waiting == 0
        await backend.stop()

    asyncio.run(leave_after_some_text())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [b"", b"\r\n"])  # what follows a whole request hides nothing
def test_a_client_that_leaves_cancels_its_answer(
    stream: bool, more: bytes, decoder: LocalDecoder
) -> None:
    with running(with_engine(decoder, endless(decoder), Slow), queue=8) as server:
        engine = server.decoder.engine
        assert isinstance(engine, Slow)
        body = {"model": MODEL, "messages": HELLO, "max_tokens": LONG, "stream": stream}
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request_bytes(body))
            wait_for(lambda: len(engine.steps) > 5)
            client.sendall(more)
            begun = len(engine.steps)
            wait_for(lambda: len(engine.steps) > begun + 20)
        server.wait_until_idle()
        assert len(engine.steps) < LONG / 2
        assert server.metric('pasta_answers_total{end="cancelled"}') == 1


def test_a_client_that_leaves_the_queue_is_never_let_in(decoder: LocalDecoder) -> None:
    slow = with_engine(decoder, endless(decoder), Slow)

    async def leave_while_waiting() -> None:
        backend = Backend(lambda: slow, Metrics(), Load(1))
        await backend.ready()
        with backend.submit([ask(slow, 60)]) as first, backend.submit([ask(slow, 60)]) as second:
            assert backend.capacity.waiting == 1
            second.close()
            found = [item async for item in first]
            assert isinstance(found[-1], Ended)
        await asyncio.to_thread(wait_for, lambda: backend.activity.cells == 0)
        assert backend.capacity.running == 0
        await backend.stop()

    asyncio.run(leave_while_waiting())


def test_an_engine_that_breaks_fails_who_was_there_and_nobody_after(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder), Broken)) as server:
        body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20}
        failed = server.ask("/v1/chat/completions", body)
        assert failed.status == 500
        assert failed.error["type"] == "server_error"
        assert failed.headers["x-request-id"]
        assert server.ask("/v1/chat/completions", body).status == 200
        assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}
        server.wait_until_idle()


def test_a_dead_engine_is_503_and_the_metrics_know(decoder: LocalDecoder) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20}
    with running(with_engine(decoder, endless(decoder))) as server:
        asyncio.run(server.backend.stop())
        got = server.ask("/v1/chat/completions", body)
        assert (got.status, got.error["code"]) == (503, "engine_stopped")
        assert server.ask("/v1/chat/completions", body | {"stream": True}).status == 503
        assert server.ask("/health").status == 503
        assert server.ask("/health").json["status"] == "failed"
        assert server.metric('pasta_requests_total{status="503"}') == 4


@pytest.mark.filterwarnings("ignore:Exception in thread pasta-engine")
def test_an_engine_that_dies_in_a_step_is_503_for_those_who_wait_and_for_those_who_come(
    decoder: LocalDecoder,
) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "n": 3}
    with running(with_engine(decoder, endless(decoder), Deadly), max_concurrency=2) as server:
        for _ in range(2):
            got = server.ask("/v1/chat/completions", body)
            assert (got.status, got.error["code"]) == (503, "engine_stopped")
        assert server.ask("/health").json == {"status": "failed", "running": 0, "waiting": 0}
        server.wait_until_idle()


def test_an_error_that_nobody_expected_is_500_and_the_metrics_know(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Backend, "submit")
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20}
    with running(with_engine(decoder, endless(decoder))) as server:
        got = server.ask("/v1/chat/completions", body)
        assert (got.status, got.error["type"]) == (500, "server_error")
        assert server.metric('pasta_requests_total{status="500"}') == 1


def test_a_stream_that_breaks_ends_with_an_error_that_the_client_raises(
    decoder: LocalDecoder,
) -> None:
    with running(with_engine(decoder, endless(decoder), Broken)) as server:
        stream = server.client().chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=20, stream=True
        )
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        server.wait_until_idle()


def test_what_is_under_way_when_the_server_stops_ends_with_an_error(decoder: LocalDecoder) -> None:
    slow = with_engine(decoder, endless(decoder), Slow)

    async def stop_in_the_middle() -> None:
        metrics = Metrics()
        backend = Backend(lambda: slow, metrics, Load())
        await backend.ready()
        with backend.submit([ask(slow)]) as answers:
            pieces = aiter(answers)
            await anext(pieces)
            await backend.stop()
            with pytest.raises(AnswerError) as broken:
                await drain(pieces)
            assert isinstance(broken.value.__cause__, ClosedError)
        assert slow.engine.slots_in_use == 0
        assert backend.capacity.unended == 0
        assert b'pasta_answers_total{end="failed"} 1.0' in metrics.render()
        assert not backend.alive
        with pytest.raises(ClosedError):
            backend.submit([ask(slow)])
        await backend.stop()

    asyncio.run(stop_in_the_middle())


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_is_told_to_stop_tells_its_clients(
    stream: bool,
    decoder: LocalDecoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pasta_decoding.server.listen.LAST_WORDS_S", 0.3)
    body = {"model": MODEL, "messages": HELLO, "max_tokens": LONG, "stream": stream}
    with running(with_engine(decoder, endless(decoder), Slow)) as server:
        with ThreadPoolExecutor(1) as client:
            asked: Future[Reply] = client.submit(server.ask, "/v1/chat/completions", body)
            wait_for(lambda: server.decoder.engine.slots_in_use > 0)
            server.http.should_exit = True
            got = asked.result()
        if stream:
            assert got.status == 200
            *_, error, done, _ = got.body.split(b"\n\n")
            assert done == b"data: [DONE]"
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_stopped"
        else:
            assert (got.status, got.error["code"]) == (503, "engine_stopped")
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


async def drain(pieces: AsyncIterator[object]) -> None:
    async for _piece in pieces:
        pass


def request_bytes(body: dict[str, Any]) -> bytes:
    """A whole HTTP request, for clients that do not behave."""
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw
