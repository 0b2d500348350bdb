"""Who may ask, under which name and from where; what is said to whom, and how much of it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.server.guard import is_loopback_name
from tests.server.running import HELLO, MODEL, Running, running, wait_for
from tests.server.scripts import Slow, endless, with_engine

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("pasta.localhost", 200),
        ("box.lan", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_its_own_names_reach_the_server(
    host: str, status: int, decoder: LocalDecoder
) -> None:
    hosts = frozenset({"box.lan"})
    with running(with_engine(decoder, endless(decoder)), hosts=hosts) as server:
        for path in ("/", "/v1/models", "/metrics"):
            got = server.ask(path, Host=host)
            assert got.status == status
        assert status == 200 or got.error["code"] == "host_not_allowed"


def test_only_what_can_mean_nothing_else_is_a_loopback_name() -> None:
    assert all(map(is_loopback_name, ["localhost", "a.localhost", "127.0.0.1", "127.9.8.7", "::1"]))
    assert not any(map(is_loopback_name, ["", "127.0.0.1.x", "localhost.x", "0.0.0.0", "::2"]))


def test_pages_from_allowed_origins_may_ask_and_no_others(decoder: LocalDecoder) -> None:
    settings: dict[str, Any] = {"origins": ("https://app.example",), "api_key": "sesame"}
    asks = {"Access_Control_Request_Method": "POST"}
    with running(with_engine(decoder, endless(decoder)), **settings) as server:
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            preflight = server.ask(CHAT, method="OPTIONS", Origin=origin, **asks)
            assert (preflight.status == 200) is allowed
            refused = server.ask(CHAT, GOOD, Origin=origin)
            assert refused.status == 401, "its key is asked for all the same"
            for got in (preflight, refused):
                named = got.headers.get("access-control-allow-origin")
                assert named == (origin if allowed else None)


def test_no_origin_is_allowed_unless_told_so(server: Running) -> None:
    got = server.ask("/v1/models", Origin="https://app.example")
    assert "access-control-allow-origin" not in got.headers


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_keys_scheme_may_be_written_in_any_case(scheme: str, decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder)), api_key="sesame") as server:
        assert server.ask("/metrics", Authorization=f"{scheme} sesame").status == 200
        assert server.ask("/metrics", Authorization=f"{scheme} Sesame").status == 401


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", f"/v1/models/{MODEL}", "/metrics"])
def test_head_is_get_without_its_body(path: str, server: Running) -> None:
    head, get = (server.ask(path, method=method) for method in ("HEAD", "GET"))
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert server.ask("/v1/nothing", method="HEAD").status == 404


def test_no_redirect_leads_to_a_host_that_the_client_named(server: Running) -> None:
    for path in ("/v1/models/", "/health/", "//evil.example/"):
        got = server.ask(path, Host="evil.example")
        assert got.status == 404
        assert "location" not in got.headers


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/nothing", "/metrics"])
def test_every_reply_has_its_own_name_and_a_type_that_is_not_guessed(
    path: str, server: Running
) -> None:
    first, second = (server.ask(path).headers for _ in range(2))
    assert first["x-content-type-options"] == "nosniff"
    assert first["x-request-id"] != second["x-request-id"]
    assert server.ask(path, X_Request_Id="mine-1.2").headers["x-request-id"] == "mine-1.2"
    odd = server.ask(path, X_Request_Id="a b" + "x" * 100).headers["x-request-id"]
    assert odd.startswith("req-")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body has a number of too many digits"),
        (b'{"model": "\xff"}', "the body is not JSON in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_for_what_it_is(
    body: bytes, reason: str, server: Running
) -> None:
    got = server.ask(CHAT, body)
    assert (got.status, got.error["message"]) == (400, reason)


def test_nothing_long_is_echoed(server: Running) -> None:
    long = "x" * 500_000
    for got in (
        server.ask(CHAT, GOOD | {"model": long}),
        server.ask(f"/v1/models/{'x' * 30_000}"),
        server.ask(f"/{'x' * 30_000}"),
        server.ask(CHAT, GOOD | {"logit_bias": {long: 1}}),
        server.ask(CHAT, GOOD | {"messages": [{"role": long, "content": "x"}]}),
    ):
        assert got.status in (400, 404)
        assert len(got.body) < 1000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, GOOD | {"max_tokens": 5000}, "max_tokens"),
        (CHAT, GOOD | {"messages": [{"role": "user", "content": "x y " * 9000}]}, "messages"),
        ("/v1/completions", {"model": MODEL, "prompt": "x y " * 9000}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 9000}, "prompt"),
    ],
)
def test_what_is_too_long_has_openais_code(
    path: str, body: dict[str, Any], param: str, server: Running
) -> None:
    got = server.ask(path, body)
    assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
    assert got.error["param"] == param


def test_a_client_has_so_many_places_and_gets_them_back(decoder: LocalDecoder) -> None:
    long = GOOD | {"max_tokens": 1500}
    slow = with_engine(decoder, endless(decoder), Slow)
    with running(slow, client_answers=2) as server:
        client = server.client()
        held = client.chat.completions.create(stream=True, n=2, **long)
        got = server.ask(CHAT, GOOD)
        assert (got.status, got.error["code"]) == (429, "client_limit")
        assert got.headers["retry-after"] == "1"
        held.close()
        wait_for(lambda: server.ask(CHAT, GOOD | {"n": 2}).status == 200)
        for n in (3, 9):
            over = server.ask(CHAT, GOOD | {"n": n})
            assert (over.status, over.error["param"]) == (400, "n")
        assert server.ask(CHAT, GOOD | {"max_tokens": 5000}).status == 400
        assert server.ask(CHAT, GOOD | {"n": 2}).status == 200
        server.wait_until_idle()


def test_what_nobody_expected_is_told_as_any_other_error(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("pasta_decoding.server.routes.Reply", broken)
    failed = server.ask(CHAT, GOOD)
    assert (failed.status, failed.error["type"]) == (500, "server_error")
    assert failed.headers["x-request-id"].startswith("req-")
    assert failed.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in json.dumps(failed.error)
    assert "a secret" in caplog.text


def test_each_request_is_a_bounded_line_of_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pasta_decoding.server"):
        name = server.ask(CHAT, GOOD).headers["x-request-id"]
        server.ask("/v1/" + "x" * 5000)
        server.ask("/v1/%0d%0aforged%1b[31m")
        wait_for(lambda: len(caplog.records) >= 3)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"{name} 127.0.0.1 POST {CHAT} 200 ") for line in lines)
    assert all(len(line) < 400 and line.isprintable() for line in lines)
    assert "Hello" not in json.dumps(lines), "what is asked is nobody's business"
