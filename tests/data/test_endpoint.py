"""The endpoint's client against a server that misbehaves: what is tried again, what is said."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import replace

import pytest

from pasta_decoding.data.endpoint import Endpoint, EndpointError, Reply, connect
from pasta_decoding.errors import PastaError, install_command
from tests.chatserver import Act, Body, ChatServer, Raw, chat_server, completion, failure, in_turn

QUESTION = [{"role": "user", "content": "Hello"}]


def endpoint(server: ChatServer, **settings: float) -> Endpoint:
    patient = Endpoint(server.base_url, "some-model", api_key="secret", max_retries=2)
    return replace(patient, **settings)  # type: ignore[arg-type]


async def ask(to: Endpoint, times: int = 1) -> list[Reply]:
    async with connect(to) as chat:
        asked = (chat(QUESTION, max_tokens=20) for _ in range(times))
        return await asyncio.gather(*asked)


def replies(acts: list[Act], **settings: float) -> tuple[Reply, ChatServer]:
    with chat_server(in_turn(acts)) as server:
        [reply] = asyncio.run(ask(endpoint(server, **settings)))
        return reply, server


def complaint(acts: list[Act], **settings: float) -> tuple[str, bool, int]:
    """Message, whether it is fatal, and how many requests came before it."""
    with chat_server(in_turn(acts)) as server:
        with pytest.raises(EndpointError) as found:
            asyncio.run(ask(endpoint(server, **settings)))
        message = str(found.value).replace(server.base_url, "URL")
        return message, found.value.fatal, len(server.bodies)


def test_an_answer_comes_with_its_cost_and_the_request_says_what_was_asked() -> None:
    reply, server = replies(["Good morning"])
    assert reply == Reply("Good morning", prompt_tokens=10, completion_tokens=2)
    assert server.bodies == [
        {"model": "some-model", "messages": QUESTION, "max_tokens": 20, "temperature": 0.0}
    ]
    assert server.keys == ["Bearer secret"]


def test_an_endpoint_that_gives_no_usage_and_no_content_is_taken_as_it_is() -> None:
    said = json.dumps({"choices": [{"message": {"content": None}, "finish_reason": "length"}]})
    reply, _ = replies([Raw(said.encode())])
    assert reply == Reply("")


@pytest.mark.parametrize("act", [failure(500), failure(503), Raw(hang_up=True), failure(429)])
def test_what_may_pass_by_itself_is_tried_again(act: Act) -> None:
    reply, server = replies([act, "At last"])
    assert (reply.text, reply.retries, len(server.bodies)) == ("At last", 1, 2)


def test_what_does_not_pass_is_named_after_the_last_try() -> None:
    late = Raw(completion("late"), wait_s=30)
    message = "URL did not answer within 1 s (tries: 2)"
    assert complaint([late], timeout_s=1, max_retries=1) == (message, False, 2)
    message, fatal, requests = complaint([failure(500)], max_retries=1)
    assert message.startswith("URL failed with status 500: ")
    assert (fatal, requests) == (False, 2)
    message, fatal, requests = complaint([Raw(hang_up=True)], max_retries=0)
    assert message.startswith("URL broke the connection: ")
    assert (fatal, requests) == (False, 1)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_not_tried_again_and_not_shown(status: int) -> None:
    keys = "PASTA_ENDPOINT_KEY or OPENAI_API_KEY"
    expected = (f"URL refuses the key ({status}); it is read from {keys}", True, 1)
    assert complaint([failure(status)]) == expected


def test_an_unknown_model_is_named() -> None:
    message, fatal, requests = complaint([failure(404)])
    assert message.startswith("URL knows no model 'some-model' (404: ")
    assert (fatal, requests) == (True, 1)


GARBAGE = [
    Raw(b'{"choices": [{"mess'),
    Raw(b"\xff\xfe"),
    Raw(b"[]"),
    Raw(b"{}"),
    Raw(b'{"choices": []}'),
    Raw(b'{"choices": [{"message": {"content": 5}}]}'),
    Raw(b"<html>Welcome</html>", headers={"Content-Type": "text/html"}),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_no_chat_completion_is_shown(garbage: Raw) -> None:
    message, fatal, _ = complaint([garbage])
    assert message.startswith("URL sent no chat completion: ")
    assert not fatal


def test_nobody_at_the_door_is_fatal() -> None:
    with chat_server(in_turn(["x"])) as server:
        gone = endpoint(server, max_retries=0)
    with pytest.raises(EndpointError, match=r"cannot be reached: .* \(tries: 1\)") as found:
        asyncio.run(ask(gone))
    assert found.value.fatal


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://here/v1", "", "http://host:abc/v1", "http://[::1/v1"]
)
def test_what_is_no_base_url_is_told_before_anything_is_asked(url: str) -> None:
    async def ask() -> None:
        async with connect(Endpoint(url, "m")):
            raise AssertionError("nobody is there")

    with pytest.raises(PastaError, match="is no base URL"):
        asyncio.run(ask())


def test_no_more_requests_are_under_way_than_allowed() -> None:
    together = threading.Barrier(3)

    def script(_number: int, _body: Body) -> Act:
        together.wait(timeout=120)  # nobody is answered before three have asked
        return "x"

    with chat_server(script) as server:
        assert len(asyncio.run(ask(endpoint(server, concurrency=3), times=9))) == 9
    assert server.busiest == 3


def test_the_key_is_never_shown_and_none_is_found_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "general")
    assert Endpoint("u", "m").api_key == ""
    assert "special" not in repr(Endpoint("u", "m", api_key="special"))


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(PastaError, match="asking an endpoint needs the package openai") as found:
        asyncio.run(ask(Endpoint("http://127.0.0.1:9/v1", "m")))
    assert found.value.hint == install_command("endpoint")
