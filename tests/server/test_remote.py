"""The server over servers of completions: the same replies, and clear errors where those fail."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from starlette.responses import Response

from pasta_decoding.engines.scripted import Script
from pasta_decoding.lang.layout import Joining
from pasta_decoding.remote.client import RetryPolicy
from pasta_decoding.remote.decoder import RemoteDecoder, remote_decoder
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load
from tests.checkpoint import TinyCheckpoint
from tests.remote.fake import Fake, refusal, serving, until
from tests.server.running import HELLO, MODEL, Running, running_over
from tests.server.scripts import endless, saying, with_engine
from tests.server.test_cancel import request_bytes

QUICK = RetryPolicy(
    connect_s=2, first_token_s=20, token_s=20, retries=1, pause_s=0.01, cooldown_s=0.2
)
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
            retry_policy=QUICK,
        )
        metrics = Metrics()
        backend = Backend(lambda: remote, metrics, Load(4, 4))
        local = replace(with_engine(decoder, script), joining=Joining.text)
        with running_over({MODEL: backend}, metrics, local) as server:
            setup = Setup(server, fake, remote, backend)
            yield setup
            setup.wait_until_idle()


def stream_text(setup: Setup, **settings: Any) -> str:
    body = setup.body(stream=True, **settings)
    stream: Any = setup.server.client().chat.completions.create(**body)
    pieces = (one.delta.content for chunk in stream for one in chunk.choices)
    return "".join(piece or "" for piece in pieces)


def test_stream_plain_reply_and_the_local_engine_agree_to_the_byte(setup: Setup) -> None:
    local = setup.server.decoder
    answer = local.answer(local.request("Hello", Rules(max_tokens=TOKENS), Sampling()))
    got: Any = setup.server.client().chat.completions.create(**setup.body())
    assert answer.text == "First: the only chunk Then the end."
    assert got.choices[0].message.content == stream_text(setup) == answer.text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == answer.fed_tokens
    assert got.usage.model_extra["critical_path"] == answer.critical_path
    assert got.usage.model_extra["threads"] == 2


def test_choices_and_live_events_come_as_from_any_engine(setup: Setup) -> None:
    body = setup.body(n=3, stream=True, stream_options={"pasta_events": True})
    stream: Any = setup.server.client().chat.completions.create(**body)
    choices = [one for chunk in stream for one in chunk.choices]
    for index in range(3):
        own = [one for one in choices if one.index == index]
        assert "".join(one.delta.content or "" for one in own).endswith("Then the end.")
        kinds = [
            event["type"] for one in own for event in one.model_extra.get("pasta_events") or []
        ]
        told = [kind for kind in kinds if kind != "delta"]
        assert told == ["opened", "closed", "synced", "finished"]


def test_a_stop_string_ends_every_request_of_the_answer(setup: Setup) -> None:
    setup.fake.token_s = 0.01
    assert stream_text(setup, stop=["only"]) == "First: the "
    setup.wait_until_idle()
    assert setup.server.metric('pasta_answers_total{end="stop_string"}') == 1


def test_the_metrics_say_what_a_planner_needs(setup: Setup) -> None:
    setup.server.client().chat.completions.create(**setup.body())
    bodies = setup.fake.bodies
    assert setup.server.metric("pasta_remote_requests_total") == len(bodies)
    prompts = sum(len(body["prompt"]) for body in bodies)
    assert setup.server.metric("pasta_remote_prompt_tokens_total") == prompts
    assert setup.server.metric("pasta_remote_cached_tokens_total") > 0
    assert setup.server.metric('pasta_answers_total{end="stop"}') == 1


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
    setup.fake.mischief = lambda _body, _pieces: refusal(500, "out of memory")
    reply = setup.server.ask("/v1/chat/completions", setup.body())
    assert reply.status == 502
    assert reply.error["code"] == "upstream_failed"
    assert reply.error["message"] == (
        "the model's own server failed: it failed with status 500: out of memory"
    )
    assert str(setup.fake.port) not in reply.error["message"], "clients need not know who it is"
    with pytest.raises(openai.APIError, match="the model's own server failed"):
        stream_text(setup)
    setup.fake.mischief = None
    assert stream_text(setup).endswith("Then the end.")
    assert setup.server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}


def test_a_stream_that_breaks_on_the_way_ends_with_an_error(setup: Setup) -> None:
    async def early(_body: object, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(pieces)

    setup.fake.mischief = early
    with pytest.raises(openai.APIError, match="it ended its reply early"):
        stream_text(setup)
    assert setup.server.metric("pasta_remote_requests_total") == len(setup.fake.bodies) > 0


def test_whoever_finds_the_queue_full_is_told_when_to_come_again(
    setup: Setup, decoder: LocalDecoder
) -> None:
    setup.fake.script, setup.fake.token_s = endless(decoder), 0.05
    body = setup.body(max_tokens=40)
    with ThreadPoolExecutor(12) as crowd:
        replies = crowd.map(lambda _: setup.server.ask("/v1/chat/completions", body), range(12))
        until(lambda: setup.server.metric("pasta_queue") == 4)
        assert setup.server.metric("pasta_running") == 4
        statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8
    assert setup.fake.most_live <= 4, "no more answers at a time than were allowed"


def test_what_does_not_fit_the_served_model_is_refused_before_it_is_asked(setup: Setup) -> None:
    body = {"model": MODEL, "prompt": [1] * 2000, "max_tokens": 100}
    reply = setup.server.ask("/v1/completions", body)
    assert reply.status == 400
    assert "do not fit the model's 2048 positions" in reply.error["message"]
    assert setup.fake.bodies == []


def test_an_answer_that_had_not_begun_when_the_server_stops_ends_with_an_error(
    setup: Setup,
) -> None:
    async def stop_at_once() -> None:
        backend = Backend(lambda: setup.remote, Metrics(), Load())
        await backend.ready()
        request = setup.remote.request("Hello", Rules(max_tokens=50), Sampling())
        with backend.submit([request]) as answers:
            await backend.stop()
            with pytest.raises(ApiError):
                [_ async for _ in answers]
        assert backend.unended == 0

    for _ in range(20):
        asyncio.run(stop_at_once())
    # A connection that was never begun would be reported as a coroutine that nobody awaited.
    gc.collect()


def test_many_clients_that_come_and_go_leave_nothing_behind(setup: Setup) -> None:
    """Some stay, some leave after a moment; a server that fails now and then adds to it."""
    turns = iter(range(10_000))

    def now_and_then(
        _body: object, pieces: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes] | Response:
        return refusal(503, "not now") if next(turns) % 17 == 16 else pieces

    setup.fake.mischief, setup.fake.token_s = now_and_then, 0.001
    stayed: list[int] = []
    statuses: set[int] = set()

    async def visit(number: int) -> None:
        client = openai.AsyncOpenAI(
            base_url=f"{setup.server.url}/v1", api_key="none", max_retries=0
        )
        async with client:
            try:
                async with asyncio.timeout(0.02 * (number % 5) or 20):
                    got: Any = await client.chat.completions.create(**setup.body())
                assert got.choices[0].message.content.endswith("Then the end.")
                stayed.append(number)
            except TimeoutError:
                assert number % 5
            except openai.APIStatusError as error:
                statuses.add(error.status_code)

    async def crowd() -> None:
        for start in range(0, 60, 6):
            await asyncio.gather(*(visit(start + n) for n in range(6)))

    asyncio.run(crowd())
    setup.wait_until_idle()
    assert len(stayed) >= 6
    assert statuses <= {502}
    for gauge in ("pasta_running", "pasta_queue", "pasta_live_threads"):
        assert setup.server.metric(gauge) == 0
    assert stream_text(setup).endswith("Then the end.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"frequency_penalty": 1}, "servers of completions cannot count what an answer repeats"),
        ({"repetition_penalty": 1.2}, "servers of completions cannot count what an answer"),
        ({"logprobs": True}, "the model's own server tells ids alone, and no logprobs"),
    ],
)
def test_what_servers_cannot_do_is_refused(
    change: dict[str, Any], reason: str, setup: Setup
) -> None:
    got = setup.server.ask("/v1/chat/completions", setup.body(**change))
    assert (got.status, got.error["type"]) == (400, "invalid_request_error")
    assert got.error["message"].startswith(reason)
    assert not setup.fake.bodies


def test_what_servers_can_do_is_passed_on(setup: Setup) -> None:
    control = setup.remote.vocabulary.control
    bias = {"20": 1.5, str(control.async_open): 50}
    got = setup.server.ask("/v1/chat/completions", setup.body(min_p=0.05, logit_bias=bias))
    assert got.status == 200
    assert {body["min_p"] for body in setup.fake.bodies} == {0.05}
    assert {body["logit_bias"]["20"] for body in setup.fake.bodies} == {1.5}
    banned = [body["logit_bias"].get(str(control.async_open)) for body in setup.fake.bodies]
    assert set(banned) == {-100}, "what may never come is forbidden all the same"
