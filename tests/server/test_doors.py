"""Who may ask, and how much of it: each limit has one request that goes beyond it."""

import json
import logging
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import openai
import pytest

from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.server import listen
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.errors import ApiError
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import LoadLimits
from tests.remote.fake import until
from tests.server.running import CHAT, GOOD, MODEL, Running, endless, head, running

PATH = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def all_of(client: socket.socket) -> bytes:
    """Return what is received until the server closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while data := client.recv(2**16):
            received += data
    return received


def test_room_is_asked_for_again_when_answers_are_handed_in() -> None:
    backend = Backend(pytest.fail, Metrics(), LoadLimits(max_requests=1, max_queue=0))
    backend.unended = 1  # it came while the model was loaded
    with pytest.raises(ApiError, match="the server has as many requests as it takes"):
        backend.submit([object()])  # type: ignore[list-item]


@pytest.fixture
def scripted(decoder: LocalDecoder) -> LocalDecoder:
    return endless(decoder, lambda _: None)


def test_the_key_is_asked_for_where_answers_and_figures_are(scripted: LocalDecoder) -> None:
    asks = {"Access_Control_Request_Method": "POST"}
    with running(scripted, api_key="sesame", origins=("https://app.example",)) as server:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            got = server.ask(path)
            assert (got.status, got.error["code"]) == (401, "invalid_api_key")
            assert got.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer sesam", "Bearer sesames", "sesame", "Basic sesame", "Bearer \xff"):
            assert server.ask(CHAT, b"not even JSON", Authorization=wrong).status == 401
        assert server.ask("/metrics", Authorization="bearer sesame").status == 200
        assert [server.ask(path).status for path in ("/", "/health")] == [200, 200]
        assert server.client(api_key="sesame").models.list().data[0].id == MODEL
        # Pages of allowed origins may ask, with the key, and no others.
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            preflight = server.ask(CHAT, method="OPTIONS", Origin=origin, **asks)
            assert (preflight.status == 200) is allowed
            refused = server.ask(CHAT, GOOD, Origin=origin)
            assert refused.status == 401
            for got in (preflight, refused):
                named = got.headers.get("access-control-allow-origin")
                assert named == (origin if allowed else None)


def test_without_a_key_only_its_own_names_reach_the_server(scripted: LocalDecoder) -> None:
    own_names = ("localhost:8000", "LOCALHOST", "[::1]:80", "pasta.localhost", "box.lan")
    with running(scripted, hosts=("box.lan",)) as server:
        for host in own_names:
            assert [server.ask(path, Host=host).status for path in ("/", "/v1/models")] == [200] * 2
        for host in ("evil.example", "127.0.0.1.evil.example", ""):
            assert [server.ask(path, Host=host).status for path in ("/", "/v1/models")] == [400] * 2


def test_a_full_queue_is_429_and_says_when_to_try_again(decoder: LocalDecoder) -> None:
    with running(endless(decoder), max_requests=1, max_queue=1) as server:
        client = server.client()
        streams = [
            client.chat.completions.create(**GOOD | {"max_tokens": 1500}, stream=True)
            for _ in range(2)
        ]
        got = server.ask(CHAT, GOOD)
        assert (got.status, got.error["code"]) == (429, "queue_full")
        assert 1 <= int(got.headers["retry-after"]) <= 60
        assert server.ask("/health").json == {"status": "ok", "running": 1, "waiting": 1}
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**GOOD)
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        never = server.ask(CHAT, GOOD | {"n": 3})
        assert (never.status, never.error["param"]) == (400, "n")
        assert "this server takes 2 at a time" in never.error["message"]
        assert server.ask(CHAT, GOOD | {"n": 2}).status == 200


LARGE = json.dumps(GOOD | {"user": "x" * 4000}).encode()
CHUNKED = head(5).replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")
TWO_LENGTHS = head(5).replace(b"Connection: close", b"Transfer-Encoding: chunked") + b"0\r\n\r\n"
# the bytes of a request, the status of the only reply, and a part of its message
BODIES: list[tuple[bytes, bytes, bytes]] = [
    (head(len(LARGE)) + LARGE, b"413", b"the body is too large for this server"),
    (CHUNKED + b"%x\r\n" % len(LARGE) + LARGE, b"413", b"the body is too large for this server"),
    (head(100) + b"{", b"408", b"the body did not arrive within 0.2 s"),
    (CHUNKED + b"1\r\n \r\n" * 20_000, b"413", b"the body has more than 4096 chunks"),
    (b"nonsense\r\n\r\n", b"400", b"Invalid HTTP request received."),
    (TWO_LENGTHS + PATH, b"400", b"Content-Length or Transfer-Encoding, not both"),
]


def test_bodies_are_bounded_in_size_and_time(scripted: LocalDecoder) -> None:
    with running(scripted, max_body_bytes=2000, body_s=0.2) as server:
        for request, status, message in BODIES:
            with connected(server) as client:
                client.sendall(request)
                got = all_of(client)
            assert got.startswith(b"HTTP/1.1 " + status)
            assert (got.count(b"HTTP/1.1 "), message in got) == (1, True)


def test_the_connection_that_idled_longest_makes_room_for_a_new_one(
    scripted: LocalDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen, "MAX_CONNECTIONS", 4)
    with running(scripted) as server, ExitStack() as clients:

        def connected_from(host: str) -> socket.socket:
            address = ("127.0.0.1", server.port)
            client = socket.create_connection(address, timeout=60, source_address=(host, 0))
            client.sendall(PATH + b"G")  # a request, and the beginning of the next one
            client.recv(2**16)
            return clients.enter_context(client)

        crowd = [connected_from("127.0.0.1") for _ in range(4)]
        while crowd[0].recv(2**16):  # one address has at most three quarters
            pass
        connected_from("127.0.0.2")
        connected_from("127.0.0.3")
        while crowd[1].recv(2**16):
            pass
        assert len(server.http.server_state.connections) == 4
        for _ in range(5):
            assert server.ask("/health").status == 200
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


def test_every_head_has_a_limit_in_time(
    scripted: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEAD_S", 0.5)
    with running(scripted) as server, connected(server) as silent, connected(server) as slow:
        slow.sendall(PATH + b"G")
        assert all_of(silent) == b""
        assert all_of(slow).count(b"HTTP/1.1 200") == 1


def test_a_client_that_does_not_read_is_left(
    scripted: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "WRITE_S", 0.3)
    with running(scripted) as server, connected(server) as client:
        client.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                client.send(PATH * 100)  # until neither side has room for more
        until(lambda: not server.http.server_state.connections)


def test_a_connection_is_kept_for_longer_than_pools_and_proxies_keep_it(server: Running) -> None:
    assert server.http.config.timeout_keep_alive == 75


def test_a_long_prompt_does_not_hold_up_other_clients(
    scripted: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, go_on = threading.Event(), threading.Event()

    def slow_prompt_ids(*_: object, **__: object) -> tuple[int, ...]:
        encoding.set()
        go_on.wait(60)
        return (5,)

    monkeypatch.setattr(LocalDecoder, "prompt_ids", slow_prompt_ids)
    with running(scripted) as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.ask, CHAT, GOOD)
        assert encoding.wait(60)
        assert server.ask("/health").status == 200
        go_on.set()
        assert reply.result().status == 200


def test_every_reply_has_its_own_name_and_a_type_that_is_not_guessed(server: Running) -> None:
    first, second, mine, odd = (
        server.ask("/nowhere", **{"X_Request_Id": name} if name else {}).headers
        for name in ("", "", "mine-1.2", "a b" + "x" * 100)
    )
    assert first["x-content-type-options"] == "nosniff"
    assert first["x-request-id"] != second["x-request-id"]
    assert mine["x-request-id"] == "mine-1.2"
    assert odd["x-request-id"].startswith("req-")
    for path in ("/", "/health", f"/v1/models/{MODEL}"):  # HEAD is GET without its body
        reply, get = (server.ask(path, method=method) for method in ("HEAD", "GET"))
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["content-type"] == get.headers["content-type"]


def test_an_error_that_nobody_expected_is_500_and_only_the_log_knows_why(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Backend, "submit", broken)
    failed = server.ask(CHAT, GOOD)
    assert (failed.status, failed.error["type"]) == (500, "server_error")
    assert failed.headers["x-request-id"].startswith("req-")
    assert "secret" not in json.dumps(failed.error)
    assert "a secret" in caplog.text
    assert server.metric('pasta_requests_total{status="500"}') == 1


def test_each_request_is_a_bounded_line_of_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pasta_decoding.server"):
        name = server.ask(CHAT, GOOD).headers["x-request-id"]
        server.ask("/v1/" + "x" * 5000)
        server.ask("/v1/%0d%0aforged%1b[31m")
        until(lambda: len(caplog.records) >= 3)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"{name} 127.0.0.1 POST {CHAT} 200 ") for line in lines)
    assert all(len(line) < 400 and line.isprintable() for line in lines)
    assert "Hello" not in json.dumps(lines), "what is asked is nobody's business"


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(
    server: Running,
) -> None:
    got = server.ask("/")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = got.body.decode()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-", "")
    assert "innerHTML" not in page
    assert not re.search("[\"'`]/v1", page), "a proxy may serve the page under a path"
