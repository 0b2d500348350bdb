"""The server over servers of completions: the same replies, and clear errors where those fail."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from pasta_decoding.engines.scripted import Script
from pasta_decoding.lang.layout import Joining
from pasta_decoding.remote.decoder import RemoteDecoder, remote_decoder
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load
from tests.checkpoint import TinyCheckpoint
from tests.remote.fake import Fake, refusal, serving, until
from tests.server.running import CHAT, HELLO, MODEL, Running, request_bytes, running
from tests.server.scripts import endless, saying, with_engine

TOKENS = 60


@dataclass(frozen=True)
class Setup:
    """A server, the fake that it asks, and what it asks it through."""

    server: Running
    fake: Fake
    remote: RemoteDecoder
    backend: Backend

    def body(self, **changes: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": TOKENS, "temperature": 0}
        return body | changes

    def stream_text(self, **settings: Any) -> str:
        stream: Any = self.server.client().chat.completions.create(
            **self.body(stream=True, **settings)
        )
        pieces = (one.delta.content for chunk in stream for one in chunk.choices)
        return "".join(piece or "" for piece in pieces)

    def wait_until_idle(self) -> None:
        until(lambda: self.fake.live == 0)
        until(lambda: self.backend.unended == 0)


@pytest.fixture
def script(decoder: LocalDecoder) -> Script:
    return saying(decoder, "First: ", "one", "the only chunk", " Then the end.")


@pytest.fixture
def setup(
    decoder: LocalDecoder, script: Script, tiny_checkpoint: TinyCheckpoint
) -> Iterator[Setup]:
    """Serve a script by way of a fake server; nothing of it is left in the end."""
    fake = Fake(script, decoder.engine.vocabulary_size, min(decoder.vocabulary.eos_ids))
    with serving(fake):
        remote = remote_decoder(
            tiny_checkpoint.base,
            tiny_checkpoint.adapter,
            [fake.url],
            joining=Joining.text,
        )
        quick = replace(remote.service, retries=1, pause_s=0.01, cooldown_s=0.2)
        remote = replace(remote, service=quick)
        backend = Backend(lambda: remote, Metrics(), Load(4, 4))
        local = replace(with_engine(decoder, script), joining=Joining.text)
        with running(local, {MODEL: backend}) as server:
            setup = Setup(server, fake, remote, backend)
            yield setup
            setup.wait_until_idle()


def test_stream_plain_reply_and_the_local_engine_agree_to_the_byte(setup: Setup) -> None:
    local = setup.server.decoder
    answer = local.answer(local.request("Hello", Rules(max_tokens=TOKENS), SamplingParams()))
    got: Any = setup.server.client().chat.completions.create(**setup.body())
    bodies = list(setup.fake.bodies)
    assert setup.server.metric("pasta_remote_requests_total") == len(bodies)
    prompts = sum(len(body["prompt"]) for body in bodies)
    assert setup.server.metric("pasta_remote_prompt_tokens_total") == prompts
    assert setup.server.metric("pasta_remote_cached_tokens_total") > 0
    assert answer.text == "First: the only chunk Then the end."
    assert got.choices[0].message.content == setup.stream_text() == answer.text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == answer.fed_tokens
    assert got.usage.model_extra["critical_path"] == answer.critical_path
    assert got.usage.model_extra["threads"] == 2
    assert setup.stream_text(stop=["only"]) == "First: the "
    setup.wait_until_idle()
    assert setup.server.metric('pasta_answers_total{end="stop_string"}') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_every_request_of_its_answer(
    stream: bool, setup: Setup, decoder: LocalDecoder
) -> None:
    setup.fake.script, setup.fake.token_s = endless(decoder), 0.01
    with socket.create_connection(("127.0.0.1", setup.server.port)) as client:
        client.sendall(request_bytes(setup.body(stream=stream, max_tokens=1000)))
        until(lambda: setup.fake.live > 0)
    setup.wait_until_idle()
    assert setup.server.metric('pasta_answers_total{end="cancelled"}') == 1
    assert setup.server.metric("pasta_remote_requests_total") == len(setup.fake.bodies) > 0


def test_a_server_that_fails_is_told_in_openais_shape_and_only_for_as_long(setup: Setup) -> None:
    async def early(_body: object, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(pieces)

    setup.fake.mischief = lambda _body, _pieces: refusal(500, "out of memory")
    reply = setup.server.ask(CHAT, setup.body())
    assert (reply.status, reply.error["code"]) == (502, "upstream_failed")
    expected = "the model's own server failed: it failed with status 500: out of memory"
    assert reply.error["message"] == expected, "clients need not know which server it is"
    setup.fake.mischief = early
    with pytest.raises(openai.APIError, match="the model's own server failed: it ended its reply"):
        setup.stream_text()
    setup.fake.mischief = None
    assert setup.stream_text().endswith("Then the end.")
    assert setup.server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}


def test_an_answer_that_had_not_begun_when_the_server_stops_ends_with_an_error(
    setup: Setup,
) -> None:
    async def stop_at_once() -> None:
        backend = Backend(lambda: setup.remote, Metrics(), Load())
        await backend.ready()
        request = setup.remote.request("Hello", Rules(max_tokens=50), SamplingParams())
        with backend.submit([request]) as answers:
            await backend.stop()
            with pytest.raises(ApiError):
                [_ async for _ in answers]
        assert backend.unended == 0

    for _ in range(4):
        asyncio.run(stop_at_once())
    # A connection that was never begun would be reported as a coroutine that nobody awaited.
    gc.collect()


def test_what_servers_cannot_do_is_refused_and_what_they_can_is_passed_on(setup: Setup) -> None:
    for change in ({"frequency_penalty": 1}, {"repetition_penalty": 1.2}, {"logprobs": True}):
        got = setup.server.ask(CHAT, setup.body(**change))
        assert (got.status, got.error["type"]) == (400, "invalid_request_error")
    assert not setup.fake.bodies
    control = setup.remote.vocabulary.control
    bias = {"20": 1.5, str(control.async_open): 50}
    assert setup.server.ask(CHAT, setup.body(min_p=0.05, logit_bias=bias)).status == 200
    assert {body["min_p"] for body in setup.fake.bodies} == {0.05}
    assert {body["logit_bias"]["20"] for body in setup.fake.bodies} == {1.5}
    banned = [body["logit_bias"].get(str(control.async_open)) for body in setup.fake.bodies]
    assert set(banned) == {-100}, "what may never come is forbidden all the same"
