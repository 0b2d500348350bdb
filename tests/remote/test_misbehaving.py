"""Servers that misbehave: it is told, tried again where that may help, and leaks nothing."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from struct import pack
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response

from pasta_decoding.engines.scripted import follow
from pasta_decoding.errors import PastaError
from pasta_decoding.remote.client import Service, checked_url, find_model
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.stream import Completion, RemoteError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.request import Rules
from tests.law.world import ASYNC, END, OPEN, P20
from tests.remote.fake import Fake, event, refusal, serving, until, usage
from tests.remote.writing import (
    IMPATIENT,
    PATIENT,
    RULES,
    asked,
    ending,
    locally,
    scripted,
    service_of,
    write,
    writer,
)
from tests.runtime.play import ID, SIZE

PROMPT = (11, 12, 13)
A, B = ID["a"], ID["b"]
REMEMBERING = replace(PATIENT, cooldown_s=60)

Body = dict[str, Any]
Pieces = AsyncIterator[bytes]


def always(response: Callable[[], Response]) -> Callable[[Body, Pieces], Response]:
    return lambda _body, _pieces: response()


async def garbage(_body: Body, _pieces: Pieces) -> Pieces:
    yield b"data: \xff\xfe nonsense\n\n"


async def early(_body: Body, pieces: Pieces) -> Pieces:
    yield await anext(pieces)


async def nothing(_body: Body, _pieces: Pieces) -> Pieces:
    return
    yield


async def twice(_body: Body, pieces: Pieces) -> Pieces:
    async for piece in pieces:
        yield piece
        if b"token_ids" in piece and b'"finish_reason": null' in piece:
            yield piece.replace(b"prompt_token_ids", b"seen_before")


async def stuck(_body: Body, pieces: Pieces) -> Pieces:
    yield await anext(pieces)
    await asyncio.sleep(60)


async def silent(_body: Body, _pieces: Pieces) -> Pieces:
    await asyncio.sleep(60)
    yield b""


async def kept_alive(_body: Body, pieces: Pieces) -> Pieces:
    """Bytes without a token, for ever."""
    yield await anext(pieces)
    while True:
        yield b": keep-alive\n\n"
        await asyncio.sleep(0.1)


async def never_begun(_body: Body, _pieces: Pieces) -> Pieces:
    while True:
        yield b": keep-alive\n\n"
        await asyncio.sleep(0.1)


async def deaf_to_bias(body: Body, pieces: Pieces) -> Pieces:
    """Insist on a closing that no promise has opened."""
    del pieces
    yield event(P20, finish_reason="length")
    yield usage(len(body["prompt"]), 1)


async def plain_text(_body: Body, _pieces: Pieces) -> Pieces:
    yield b'data: {"choices": [{"text": "Hello"}]}\n\n'


FAILURES: dict[str, tuple[Any, str, int]] = {
    "garbage": (garbage, "it sent no completion: b'\\xff\\xfe nonsense'", 1),
    "an early end": (early, "it ended its reply early", 1),
    "an empty reply": (nothing, "it ended its reply early (tries: 3)", 3),
    "tokens twice": (twice, "it streamed ", 1),
    "a stream that stops": (stuck, "it sent no token for 0.5 s", 1),
    "a stream that is kept alive": (kept_alive, "it sent no token for 0.5 s", 1),
    "silence": (silent, "it sent no token for 1 s (tries: 3)", 3),
    "nothing but signs of life": (never_begun, "it sent no token for 1 s (tries: 3)", 3),
    "no token ids": (plain_text, "it streams no token ids", 1),
    "busy": (
        always(lambda: refusal(429, "try later", Retry_After="0")),
        "it failed with status 429: try later (tries: 3)",
        3,
    ),
    "broken": (
        always(lambda: PlainTextResponse("boom", 500)),
        "it failed with status 500: boom (tries: 3)",
        3,
    ),
    "a refusal": (
        always(lambda: refusal(400, "logit_bias is not known")),
        "it failed with status 400: logit_bias is not known",
        1,
    ),
    "a page": (
        always(lambda: PlainTextResponse("<html>", 200)),
        "it sent no completion: b'<html>'",
        1,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_and_tried_again_only_before_the_first_token(name: str) -> None:
    mischief, message, tries = FAILURES[name]
    script = follow((13, A, B, A, A, B, END), vocabulary_size=SIZE)
    with serving(Fake(script, SIZE, END)) as fake:
        fake.mischief = mischief
        with pytest.raises(RemoteError) as caught:
            write(service_of(fake, retry_policy=IMPATIENT), [asked(PROMPT)])
        assert str(caught.value).startswith(f"the server at {fake.url} failed: {message}")
        assert len(fake.bodies) == tries
        fake.mischief = None
        [answer] = write(service_of(fake), [asked(PROMPT)])
        assert answer.text == "abaab"
        until(lambda: fake.live == 0)


def test_a_server_that_does_not_know_logit_bias_is_found_out() -> None:
    with serving(scripted()) as fake:
        fake.mischief = deaf_to_bias
        with pytest.raises(RemoteError, match="insists on the token 5, which `logit_bias` forbids"):
            write(service_of(fake), [asked(PROMPT)])
        assert len(fake.bodies) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_what_passes_by_itself_is_waited_for(status: int) -> None:
    failing = iter([True, True])

    def sometimes(_body: Body, pieces: Pieces) -> Pieces | Response:
        return refusal(status, "not now", Retry_After="0") if next(failing, False) else pieces

    with serving(scripted()) as fake:
        fake.mischief = sometimes
        [answer] = write(service_of(fake), [asked(PROMPT)])
        assert answer.segments == locally(asked(PROMPT), ending(7)).segments
        assert answer.trace.sent is not None
        assert answer.trace.sent.requests == len(fake.bodies)


def test_a_chunk_that_fails_for_good_takes_its_siblings_along() -> None:
    script = follow((13, A, OPEN, B, P20, A), (P20, ASYNC, A), vocabulary_size=SIZE, otherwise=A)

    def chunks_fail(body: Body, pieces: Pieces) -> Pieces | Response:
        return refusal(400, "no chunks here") if body["prompt"][-1] == ASYNC else pieces

    with serving(Fake(script, SIZE, END, token_s=0.01)) as fake:
        fake.mischief = chunks_fail
        with pytest.raises(RemoteError, match="no chunks here"):
            write(service_of(fake), [asked(PROMPT, rules=replace(RULES, max_tokens=4000))])
        until(lambda: fake.live == 0)
        assert fake.written_tokens < 4000, "main was left to write"


def test_one_answer_that_fails_leaves_the_others_alone() -> None:
    def one_fails(body: Body, pieces: Pieces) -> Pieces | Response:
        return refusal(400, "not this one") if body["prompt"][2] == 14 else pieces

    async def both(fake: Fake) -> list[Answer | BaseException]:
        async with ReplicaPool(service_of(fake)) as pool:
            writers = [writer(asked((11, 12, last)), pool) for last in (13, 14)]
            return await asyncio.gather(*(w.run() for w in writers), return_exceptions=True)

    with serving(scripted()) as fake:
        fake.mischief = one_fails
        good, bad = asyncio.run(both(fake))
    assert isinstance(good, Answer)
    assert good.segments == locally(asked(PROMPT), ending(7)).segments
    assert isinstance(bad, RemoteError)


# Several servers


def test_answers_take_turns_and_each_stays_where_it_began() -> None:
    with serving(scripted()) as one, serving(scripted()) as other:
        requests = [asked((11, 12, 13 + n)) for n in range(6)]
        write(service_of(one, other), requests)
        for fake in (one, other):
            assert len({tuple(body["prompt"][:3]) for body in fake.bodies}) == 3
        places = [{tuple(body["prompt"][:3]) for body in fake.bodies} for fake in (one, other)]
        assert places[0].isdisjoint(places[1])


def test_answers_go_to_the_server_that_can_be_reached() -> None:
    with serving(scripted()) as one, serving(scripted()) as gone:
        service = service_of(gone, one)
    with serving(one, port=one.port):
        answers = write(service, [asked((11, 12, 13 + n)) for n in range(4)])
    for n, answer in enumerate(answers):
        assert answer.segments == locally(asked((11, 12, 13 + n)), ending(7)).segments


async def one_by_one(service: Service, count: int) -> list[Answer | RemoteError]:
    """Write answers one after the other; one that fails does not keep the next from coming."""
    came: list[Answer | RemoteError] = []
    async with ReplicaPool(service) as pool:
        for n in range(count):
            try:
                came.append(await writer(asked((11, 12, 13 + n)), pool).run())
            except RemoteError as error:
                came.append(error)
    return came


@pytest.mark.parametrize("mischief", [always(lambda: refusal(503, "broken")), nothing])
def test_a_server_that_only_ever_fails_is_left_and_avoided(mischief: Any) -> None:
    with serving(scripted()) as broken, serving(scripted()) as good:
        broken.mischief = mischief
        service = service_of(broken, good, retry_policy=REMEMBERING)
        together = write(service, [asked((11, 12, 13 + n)) for n in range(6)])
        for n, answer in enumerate(together):
            assert answer.segments == locally(asked((11, 12, 13 + n)), ending(7)).segments
        assert len(broken.bodies) == 3 * 2, "half of them began there, and tried twice"
        broken.bodies.clear()
        assert all(isinstance(one, Answer) for one in asyncio.run(one_by_one(service, 4)))
        assert len(broken.bodies) == 2, "the first of them found out for all"


@pytest.mark.parametrize("mischief", [early, garbage, always(lambda: refusal(404, "who?"))])
def test_a_server_where_an_answer_failed_for_good_gets_no_new_ones_for_a_while(
    mischief: Any,
) -> None:
    with serving(scripted()) as broken, serving(scripted()) as good:
        broken.mischief = mischief
        answers = asyncio.run(one_by_one(service_of(broken, good, retry_policy=REMEMBERING), 5))
        assert [type(one) for one in answers] == [RemoteError] + [Answer] * 4
        assert {tuple(body["prompt"][:3]) for body in broken.bodies} == {PROMPT}


def test_a_server_that_is_busy_is_waited_for_where_the_answer_began() -> None:
    with serving(scripted()) as one, serving(scripted()) as other:
        one.mischief = always(lambda: refusal(429, "try later", Retry_After="0"))
        answers = asyncio.run(one_by_one(service_of(one, other, retry_policy=REMEMBERING), 4))
        assert [type(one) for one in answers] == [RemoteError, Answer] * 2
        assert len(one.bodies) == 2 * 3


def test_a_request_that_does_not_fit_is_no_reason_to_avoid_a_server() -> None:
    with serving(scripted()) as one, serving(scripted()) as other:
        one.mischief = always(lambda: refusal(400, "too long"))
        answers = asyncio.run(one_by_one(service_of(one, other, retry_policy=REMEMBERING), 4))
        assert [type(one) for one in answers] == [RemoteError, Answer] * 2


def test_requests_that_fail_together_move_their_answer_once() -> None:
    async def fail_together(service: Service) -> None:
        async with ReplicaPool(service) as pool:
            with pool.lease() as lease:
                failed = lease.replica
                lease.move(failed)
                better = lease.replica
                lease.move(failed)
                assert lease.replica is better is not failed
                assert (failed.answers, better.answers) == (0, 1)
                assert failed.cooldown_until_s > better.cooldown_until_s == 0

    asyncio.run(fail_together(service_of(scripted(), scripted())))


def test_the_server_that_is_named_and_rests_is_the_one_that_was_asked() -> None:
    """Not the one that the answer has moved to while the request was under way."""

    async def move_meanwhile(service: Service) -> tuple[str, list[float]]:
        async with ReplicaPool(service) as pool:
            with pool.lease() as lease:
                tokens = pool.stream(lease, Completion(PROMPT, 20, (END,), END))
                await anext(tokens)
                asked_at = lease.replica
                lease.move(asked_at)
                asked_at.cooldown_until_s = 0
                with pytest.raises(RemoteError) as caught:
                    await anext(tokens)
                return str(caught.value), [
                    asked_at.cooldown_until_s,
                    lease.replica.cooldown_until_s,
                ]

    with serving(scripted()) as one, serving(scripted()) as other:
        one.mischief = early
        message, cooldown_until_s = asyncio.run(move_meanwhile(service_of(one, other)))
    assert message == f"the server at {one.url} failed: it ended its reply early"
    assert cooldown_until_s[0] > 0 == cooldown_until_s[1]


def listing(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (listing(b"loading", "529 Busy"), r"^no server is ready: .+ status 529: loading$"),
        (listing(b"no", "401 No"), r"refuses the key \(401\)"),
        (listing(b"[" * 200_000), "does not list models"),
        (listing(b'{"data": 3}'), "does not list models"),
        (listing(b'{"data": [3]}'), "does not list models"),
        (listing(b'{"data": []}'), "serves no model, none of them called 'a'"),
        (listing(b'{"data": [{"id": "b"}, {"id": "c"}]}'), "serves 'b', 'c', none of them called"),
        (listing(b" " * 2**21), "no server is ready: .+ its list of models has no end"),
    ],
)
def test_a_broken_list_of_models_is_told_and_another_server_may_do(
    words: bytes, message: str
) -> None:
    with serving(scripted()) as good, hanging_up(words) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(PastaError, match=message):
            find_model([url], ["a"], api_key=None)
        if "no server" in message:
            found = find_model([url, good.url], [], api_key=None)
            assert found == (good.model, good.max_model_len)


def test_a_list_of_models_that_drips_is_given_up() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    with hanging_up(head, drips=True) as port, pytest.raises(PastaError, match="has no end"):
        find_model([f"http://127.0.0.1:{port}/v1"], [], api_key=None, connect_s=0.3)


@pytest.mark.parametrize(
    "url", ["http://a..b/v1", f"http://{'a' * 64}.org/v1", "ftp://a/v1", "http://a/v1?x=1", "a"]
)
def test_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(PastaError, match="is no base URL"):
        checked_url(url)
    assert checked_url("http://[::1]:8000") == "http://[::1]:8000/v1"


def test_a_server_that_nobody_answers_at_is_named() -> None:
    with serving(scripted()) as fake:
        service = service_of(fake)
    with pytest.raises(RemoteError) as caught:
        write(service, [asked(PROMPT)])
    assert str(caught.value).startswith(f"the server at {fake.url} failed: it cannot be reached: ")
    assert str(caught.value).endswith("(tries: 3)")


def test_a_server_that_is_killed_fails_who_was_there_and_serves_who_comes_after() -> None:
    request = asked(PROMPT, rules=Rules(max_tokens=100))

    async def survive(fake: Fake, kill: Callable[[], None], revive: Callable[[], None]) -> Answer:
        async with ReplicaPool(service_of(fake)) as pool:
            begun = asyncio.Event()
            one = writer(request, pool, lambda _events, _step: begun.set())
            task = asyncio.create_task(one.run())
            await begun.wait()
            await asyncio.to_thread(kill)
            with pytest.raises(RemoteError, match=r"broke the connection|ended its reply early"):
                await task
            await asyncio.to_thread(revive)
            return await writer(request, pool).run()

    # One request writes all of it: had it been between two, the next would find nobody there.
    endless = follow((A, B), (B, A), vocabulary_size=SIZE, otherwise=A)
    fake = Fake(endless, SIZE, END, token_s=0.1)
    with revivable(fake) as (kill, revive):
        answer = asyncio.run(survive(fake, kill, revive))
    assert answer.segments == locally(request, endless).segments


@contextmanager
def revivable(fake: Fake) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Serve; the functions kill the server and start it again on its port."""
    running = [serving(fake)]
    running[0].__enter__()

    def kill() -> None:
        running.pop().__exit__(None, None, None)

    def revive() -> None:
        fake.token_s = 0.0
        running.append(serving(fake, port=fake.port))
        running[0].__enter__()

    try:
        yield kill, revive
    finally:
        while running:
            kill()


def test_more_requests_than_connections_wait_for_their_turn() -> None:
    with serving(scripted()) as fake:
        requests = [asked((11, 12, 13 + n)) for n in range(6)]
        answers = write(service_of(fake, connections=2), requests)
        assert fake.most_live <= 2
    for request, answer in zip(requests, answers, strict=True):
        assert answer.segments == locally(request, ending(7)).segments


def test_a_server_that_closes_every_connection_at_once_is_told() -> None:
    """No HTTP at all: bytes that mean nothing, or none."""
    for words in (b"", b"SSH-2.0-OpenSSH\r\n\r\n"):
        with hanging_up(words) as port:
            fake = scripted()
            fake.port = port
            with pytest.raises(RemoteError, match="it broke the connection"):
                write(service_of(fake), [asked(PROMPT)])


@contextmanager
def hanging_up(words: bytes, *, drips: bool = False) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in itertools.count():
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    client.sendall(words)
                    with suppress(OSError):  # until nobody listens
                        while drips:
                            client.sendall(b" ")
                            time.sleep(0.05)
                    if not words:  # reset it: what is closed without lingering is not ended
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
