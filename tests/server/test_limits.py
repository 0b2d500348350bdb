"""What the server takes, from whom, and how it says no."""

from __future__ import annotations

import socket
import time
from http.client import HTTPConnection
from typing import Any, NoReturn

import openai
import pytest

from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.server import transport
from tests.server.running import HELLO, MODEL, running, wait_for
from tests.server.scripts import Slow, endless, with_engine

LONG: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 1500, "temperature": 0}
SHORT = LONG | {"max_tokens": 5}
CHAT = "/v1/chat/completions"


def test_a_full_queue_is_429_and_says_when_to_try_again(decoder: LocalDecoder) -> None:
    with running(
        with_engine(decoder, endless(decoder), Slow), max_concurrency=1, queue=1
    ) as server:
        client = server.client()
        held = [client.chat.completions.create(stream=True, **LONG) for _ in range(2)]
        got = server.ask(CHAT, SHORT)
        assert got.status == 429
        assert got.error["code"] == "queue_full"
        assert 1 <= int(got.headers["retry-after"]) <= 60
        assert server.ask("/health").json == {"status": "ok", "running": 1, "waiting": 1}
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**SHORT)
        for stream in held:
            stream.close()
        wait_for(lambda: server.ask(CHAT, SHORT).status == 200)
        server.wait_until_idle()


def test_more_answers_than_are_ever_taken_at_a_time_are_400(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder)), max_concurrency=1, queue=1) as server:
        got = server.ask(CHAT, SHORT | {"n": 3})
        assert got.status == 400
        assert got.error["message"] == (
            "these are 3 answers, and this server takes 2 at a time. "
            "Ask for fewer choices or prompts."
        )
        prompts = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 5}
        assert server.ask("/v1/completions", prompts | {"n": 2}).status == 400
        assert server.ask("/v1/completions", prompts).status == 200
        assert server.ask(CHAT, SHORT | {"n": 2}).status == 200
        server.wait_until_idle()


def test_the_key_is_asked_for_where_answers_and_figures_are(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder)), api_key="sesame") as server:
        right = {"Authorization": "Bearer sesame"}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            got = server.ask(path)
            assert (got.status, got.error["code"]) == (401, "invalid_api_key")
            assert got.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer sesam", "Bearer sesames", "sesame", "Basic sesame", "Bearer \xff"):
            assert server.ask(CHAT, b"not even JSON", Authorization=wrong).status == 401
        assert server.ask("/metrics", **right).status == 200
        for path in ("/", "/health"):
            assert server.ask(path).status == 200
        assert server.client(api_key="sesame").models.list().data[0].id == MODEL
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="other").chat.completions.create(**SHORT)


def test_a_body_that_is_too_large_is_413(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder)), max_body_bytes=2000) as server:
        big = SHORT | {"messages": [{"role": "user", "content": "x" * 4000}]}
        got = server.ask(CHAT, big)
        assert (got.status, got.error["message"]) == (
            413,
            "the body is too large for this server",
        )
        # Sent in pieces, no length tells beforehand.
        raw = chunked(server.port, [b"[" * 1000] * 3)
        assert raw.startswith(b"HTTP/1.1 413 ")
        assert server.ask(CHAT, SHORT).status == 200


def test_a_body_that_does_not_come_is_408_and_then_the_connection_is_closed(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PATIENCE_S", 0.3)
    with running(with_engine(decoder, endless(decoder)), body_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
            client.sendall(head(100) + b"{")
            got = client.recv(4096)
            client.sendall(b" ")
            got += b"".join(iter(lambda: client.recv(4096), b""))
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.2 s" in got
        assert server.ask(CHAT, SHORT).status == 200


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", CHAT, "wrong", 401),
        ("POST", "/v1/nothing", "sesame", 404),
        ("DELETE", CHAT, "sesame", 405),
        ("POST", CHAT, "sesame", 413),
        ("GET", "/v1/models", "sesame", 200),
    ],
)
def test_a_body_that_goes_on_behind_its_reply_is_not_read_for_ever(
    method: str,
    path: str,
    key: str,
    status: int,
    decoder: LocalDecoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "PATIENCE_S", 0.3)
    settings: dict[str, Any] = {"api_key": "sesame", "max_body_bytes": 1024}
    with running(with_engine(decoder, endless(decoder)), **settings) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
            client.sendall(head(10**9, method, path, key) + b" " * 2000)
            assert client.recv(4096).startswith(b"HTTP/1.1 %d " % status)
            with pytest.raises(ConnectionError):
                trickle(client)
        assert server.ask("/health").status == 200


def test_whoever_sends_far_too_much_still_reads_why_it_was_refused(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder)), max_body_bytes=1024) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        for _ in range(2):  # the connection is as good as before
            connection.request("POST", CHAT, b" " * 2**24, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 413
            assert b"too large" in reply.read()
        connection.close()


def test_a_head_that_does_not_come_closes_the_connection(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PATIENCE_S", 0.3)
    with running(with_engine(decoder, endless(decoder))) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
            client.sendall(b"POST / HTTP/1.1\r\n")
            assert client.recv(100) == b""
        assert server.ask(CHAT, SHORT).status == 200


def test_who_asks_and_never_reads_loses_the_connection_and_who_reads_late_does_not(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "UNREAD_S", 2.0)
    asked = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 500

    def replies_after(seconds: float) -> int:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
            client.sendall(asked + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            time.sleep(seconds)
            return b"".join(iter(lambda: client.recv(2**16), b"")).count(b"HTTP/1.1 200 ")

    with running(with_engine(decoder, endless(decoder))) as server:
        assert replies_after(0) == replies_after(0.3) == 501
        assert 0 < replies_after(5) < 501
        assert server.ask("/health").status == 200


def test_what_is_not_http_is_refused_and_the_server_lives_on(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder))) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
            client.sendall(b"\x00\xff\x00 hello\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        assert server.ask(CHAT, SHORT).status == 200


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(
    decoder: LocalDecoder,
) -> None:
    with running(with_engine(decoder, endless(decoder))) as server:
        got = server.ask("/")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = got.body.decode()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "innerHTML" not in page


def head(length: int, method: str = "POST", path: str = CHAT, key: str = "none") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def trickle(client: socket.socket) -> NoReturn:
    """Send a little now and then for as long as it is taken."""
    while True:
        client.sendall(b" ")
        time.sleep(0.01)


def chunked(port: int, pieces: list[bytes]) -> bytes:
    start = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(f"{start}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        client.sendall(b"0\r\n\r\n")
        return client.recv(4096)
