"""The server over servers of completions: the same replies, and clear errors where those fail."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import openai
import pytest

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.lang.layout import Joining
from pasta_decoding.remote.decoder import remote_decoder
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint
from tests.remote.fake import Fake, refusal, serving, until
from tests.server.running import CHAT, GOOD, Running, running, saying, with_engine

LONG = GOOD | {"max_tokens": 60}


@pytest.fixture
def fake(decoder: LocalDecoder) -> Iterator[Fake]:
    size = decoder.engine.vocabulary_size
    end = min(decoder.vocabulary.eos_ids)
    with serving(Fake(saying(decoder), size, end)) as fake:
        yield fake
        until(lambda: fake.live == 0)


@pytest.fixture
def server(decoder: LocalDecoder, fake: Fake, tiny_checkpoint: TinyCheckpoint) -> Iterator[Running]:
    """Serve a script by way of a fake server; `decoder` is the same in this process."""
    remote = remote_decoder(tiny_checkpoint.source, [fake.url], joining=Joining.text)
    service = replace(remote.service, retries=1, pause_s=0.01, cooldown_s=0.2)
    local = replace(with_engine(decoder, saying(decoder)), joining=Joining.text)
    with running(local, served_decoder=replace(remote, service=service)) as server:
        yield server
        server.wait_until_idle()


def test_stream_plain_reply_and_the_local_engine_agree_to_the_byte(
    server: Running, fake: Fake
) -> None:
    local = server.decoder
    answer = local.answer(local.request("Hello", Rules(max_tokens=60), SamplingParams()))
    got = server.ask(CHAT, LONG)
    assert server.metric("pasta_remote_requests_total") == len(fake.bodies)
    prompts = sum(len(body["prompt"]) for body in fake.bodies)
    assert server.metric("pasta_remote_prompt_tokens_total") == prompts
    assert server.metric("pasta_remote_cached_tokens_total") > 0
    assert answer.text == "One: an apple Done."
    assert got.text == server.ask(CHAT, LONG | {"stream": True}).text == answer.text
    assert got.json["choices"][0]["finish_reason"] == "stop"
    costs = {"completion_tokens": answer.fed_tokens, "critical_path": answer.critical_path}
    assert got.json["usage"] | costs | {"threads": 2} == got.json["usage"]
    assert server.ask(CHAT, LONG | {"stream": True, "stop": ["apple"]}).text == "One: an "
    server.wait_until_idle()
    assert server.metric('pasta_answers_total{end="stop_string"}') == 1


def test_a_server_that_fails_is_told_in_openais_shape_and_only_for_as_long(
    server: Running, fake: Fake
) -> None:
    async def early(_body: object, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(pieces)

    fake.mischief = lambda _body, _pieces: refusal(500, "out of memory")
    reply = server.ask(CHAT, LONG)
    assert (reply.status, reply.error["code"]) == (502, "upstream_failed")
    expected = "the model's own server failed: it failed with status 500: out of memory"
    assert reply.error["message"] == expected, "clients need not know which server it is"
    fake.mischief = early
    with pytest.raises(openai.APIError, match="the model's own server failed: it ended its reply"):
        list(server.client().chat.completions.create(**LONG, stream=True))
    fake.mischief = None
    assert server.ask(CHAT, LONG | {"stream": True}).text.endswith("Done.")
    assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}


def test_what_servers_cannot_do_is_refused_and_what_they_can_is_passed_on(
    server: Running, fake: Fake
) -> None:
    for change in ({"frequency_penalty": 1}, {"repetition_penalty": 1.2}, {"logprobs": True}):
        assert server.ask(CHAT, LONG | change).status == 400
    control = server.decoder.vocabulary.control
    bias = {"20": 1.5, str(control.async_open): 50}
    assert server.ask(CHAT, LONG | {"min_p": 0.05, "logit_bias": bias}).status == 200
    assert {body["min_p"] for body in fake.bodies} == {0.05}
    assert {body["logit_bias"]["20"] for body in fake.bodies} == {1.5}
    banned = [body["logit_bias"].get(str(control.async_open)) for body in fake.bodies]
    assert set(banned) == {-100}, "what may never come is forbidden all the same"
