"""The server over servers of completions: the same replies, and clear errors where those fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from pasta_decoding.engines.scripted import Script
from pasta_decoding.lang.layout import Joining
from pasta_decoding.remote.decoder import RemoteDecoder, remote_decoder
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from tests.checkpoint import TinyCheckpoint
from tests.remote.fake import Fake, refusal, serving, until
from tests.server.running import CHAT, HELLO, MODEL, Running, running
from tests.server.scripts import saying, with_engine

TOKENS = 60


@pytest.fixture
def script(decoder: LocalDecoder) -> Script:
    return saying(decoder, "First: ", "one", "the only chunk", " Then the end.")


@pytest.fixture
def fake(decoder: LocalDecoder, script: Script) -> Iterator[Fake]:
    size = decoder.engine.vocabulary_size
    with serving(Fake(script, size, min(decoder.vocabulary.eos_ids))) as fake:
        yield fake
        until(lambda: fake.live == 0)


@pytest.fixture
def remote(fake: Fake, tiny_checkpoint: TinyCheckpoint) -> RemoteDecoder:
    where = (tiny_checkpoint.base, tiny_checkpoint.adapter, [fake.url])
    found = remote_decoder(*where, joining=Joining.text)
    return replace(found, service=replace(found.service, retries=1, pause_s=0.01, cooldown_s=0.2))


@pytest.fixture
def server(decoder: LocalDecoder, script: Script, remote: RemoteDecoder) -> Iterator[Running]:
    """Serve a script by way of a fake server; `decoder` is the same in this process."""
    local = replace(with_engine(decoder, script), joining=Joining.text)
    with running(local, own=remote) as server:
        yield server
        server.wait_until_idle()


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": TOKENS, "temperature": 0} | changes


def stream_text(server: Running, **settings: Any) -> str:
    stream: Any = server.client().chat.completions.create(**body(stream=True, **settings))
    pieces = (one.delta.content for chunk in stream for one in chunk.choices)
    return "".join(piece or "" for piece in pieces)


def test_stream_plain_reply_and_the_local_engine_agree_to_the_byte(
    server: Running, fake: Fake
) -> None:
    local = server.decoder
    answer = local.answer(local.request("Hello", Rules(max_tokens=TOKENS), SamplingParams()))
    got: Any = server.client().chat.completions.create(**body())
    bodies = list(fake.bodies)
    assert server.metric("pasta_remote_requests_total") == len(bodies)
    prompts = sum(len(body["prompt"]) for body in bodies)
    assert server.metric("pasta_remote_prompt_tokens_total") == prompts
    assert server.metric("pasta_remote_cached_tokens_total") > 0
    assert answer.text == "First: the only chunk Then the end."
    assert got.choices[0].message.content == stream_text(server) == answer.text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == answer.fed_tokens
    assert got.usage.model_extra["critical_path"] == answer.critical_path
    assert got.usage.model_extra["threads"] == 2
    assert stream_text(server, stop=["only"]) == "First: the "
    server.wait_until_idle()
    assert server.metric('pasta_answers_total{end="stop_string"}') == 1


def test_a_server_that_fails_is_told_in_openais_shape_and_only_for_as_long(
    server: Running, fake: Fake
) -> None:
    async def early(_body: object, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(pieces)

    fake.mischief = lambda _body, _pieces: refusal(500, "out of memory")
    reply = server.ask(CHAT, body())
    assert (reply.status, reply.error["code"]) == (502, "upstream_failed")
    expected = "the model's own server failed: it failed with status 500: out of memory"
    assert reply.error["message"] == expected, "clients need not know which server it is"
    fake.mischief = early
    with pytest.raises(openai.APIError, match="the model's own server failed: it ended its reply"):
        stream_text(server)
    fake.mischief = None
    assert stream_text(server).endswith("Then the end.")
    assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}


def test_what_servers_cannot_do_is_refused_and_what_they_can_is_passed_on(
    server: Running, fake: Fake, remote: RemoteDecoder
) -> None:
    for change in ({"frequency_penalty": 1}, {"repetition_penalty": 1.2}, {"logprobs": True}):
        got = server.ask(CHAT, body(**change))
        assert (got.status, got.error["type"]) == (400, "invalid_request_error")
    assert not fake.bodies
    control = remote.vocabulary.control
    bias = {"20": 1.5, str(control.async_open): 50}
    assert server.ask(CHAT, body(min_p=0.05, logit_bias=bias)).status == 200
    assert {body["min_p"] for body in fake.bodies} == {0.05}
    assert {body["logit_bias"]["20"] for body in fake.bodies} == {1.5}
    banned = [body["logit_bias"].get(str(control.async_open)) for body in fake.bodies]
    assert set(banned) == {-100}, "what may never come is forbidden all the same"
