"""Servers that misbehave: an error names the failure, some requests are tried again, none leaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import pytest
from starlette.responses import PlainTextResponse, Response

from pasta_decoding.answer.settings import Rules
from pasta_decoding.errors import PastaError, checked_url
from pasta_decoding.remote import client
from pasta_decoding.remote.client import ReplicaPool
from pasta_decoding.remote.decoder import find_model
from pasta_decoding.remote.stream import RemoteError
from tests.answer.play import ID, SIZE
from tests.law.world import ASYNC, END, OPEN, P20
from tests.remote.fake import (
    Body,
    Fake,
    Mischief,
    event,
    hanging_up,
    refusal,
    serving,
    until,
    usage,
)
from tests.remote.writing import ending, locally, request_for, scripted, service_of, write, writer
from tests.scripted import follow

PROMPT = (11, 12, 13)
PROMPTS = [(11, 12 + n, 13) for n in range(6)]
A = ID["a"]
B = ID["b"]
WRITES_ABAAB = follow((13, A, B, A, A, B, END), vocabulary_size=SIZE)

Pieces = AsyncIterator[bytes]


async def nonsense(_body: Body, _pieces: Pieces) -> Pieces:
    yield b"data: \xff\xfe nonsense\n\n"


def refusing(status: int, message: str) -> Mischief:
    return lambda _body, _pieces: refusal(status, message)


def abaab() -> Fake:
    return Fake(WRITES_ABAAB, SIZE, END)


def beginning(tokens: int = 1, *, ends_after_s: float = 60, alive: bytes = b"") -> Mischief:
    """Return a mischief that sends some tokens, then `alive` or nothing, and ends too early."""

    async def first_tokens(_body: Body, pieces: Pieces) -> Pieces:
        for _ in range(tokens):
            yield await anext(pieces)
        for _ in range(int(ends_after_s * 10)):
            await asyncio.sleep(0.1)
            yield alive

    return first_tokens


async def breaking(_body: Body, pieces: Pieces) -> Pieces:
    yield await anext(pieces)
    raise ConnectionResetError


async def deaf(body: Body, _pieces: Pieces) -> Pieces:
    """Insist on a closing that no promise has opened."""
    yield event(P20, finish_reason="length")
    yield usage(len(body["prompt"]), 1)


EARLY = beginning(ends_after_s=0)
EMPTY = beginning(0, ends_after_s=0)
AT = "the server at URL failed: "
LIFE = b": keep-alive\n\n"

FAILURES: dict[str, tuple[Mischief, str, int]] = {
    "garbage": (nonsense, AT + "it sent no completion: b'\\xff\\xfe nonsense'", 1),
    "an early end": (EARLY, AT + "it ended its reply early", 1),
    "an empty reply": (EMPTY, AT + "it ended its reply early (tries: 3)", 3),
    "a broken connection": (breaking, AT + "it broke the connection: ", 1),
    "a stream that stops": (beginning(), AT + "it sent no token for 0.2 s", 1),
    "life alone": (beginning(0, alive=LIFE), AT + "it sent no token for 0.4 s (tries: 3)", 3),
    "busy": (refusing(429, "later"), AT + "it failed with status 429: later (tries: 3)", 3),
    "broken": (
        lambda *_: PlainTextResponse("boom", 500),
        AT + "it failed with status 500: boom (tries: 3)",
        3,
    ),
    "a refusal": (refusing(400, "no bias"), AT + "it failed with status 400: no bias", 1),
    "another key": (refusing(401, "no"), AT + "it refuses the key (401); set PASTA_REMOTE_KEY", 1),
    "no such model": (refusing(404, "no"), AT + "it knows no model 'tiny', or no completions", 1),
    "no bias": (deaf, "the server insists on the token 5, which `logit_bias` forbids", 2),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_reported_and_tried_again_only_before_the_first_token(name: str) -> None:
    mischief, message, tries = FAILURES[name]
    with serving(abaab()) as fake:
        fake.mischief = mischief
        with pytest.raises(RemoteError) as caught:
            write(service_of(fake, first_token_s=0.4, token_s=0.2), [request_for(PROMPT)])
        assert str(caught.value).replace(fake.url, "URL").startswith(message)
        assert len(fake.bodies) == tries
        fake.mischief = None
        [answer] = write(service_of(fake), [request_for(PROMPT)])
        assert answer.text == "abaab"
        until(lambda: fake.live == 0)


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH\r\n\r\n"])
def test_an_address_without_an_http_server_is_named(words: bytes) -> None:
    fake = scripted()
    with hanging_up(words) as fake.port, pytest.raises(RemoteError) as caught:
        write(service_of(fake), [request_for(PROMPT)])
    assert f"{fake.url} failed: it broke the connection" in str(caught.value)
    with pytest.raises(RemoteError, match=f"{fake.url} failed: it cannot be reached: .* 3\\)$"):
        write(service_of(fake), [request_for(PROMPT)])


def test_a_server_that_is_busy_for_a_while_is_tried_again() -> None:
    failing = iter([refusal(503, "not now")] * 2)
    with serving(scripted()) as fake:
        fake.mischief = lambda _body, pieces: next(failing, pieces)
        [answer] = write(service_of(fake), [request_for(PROMPT)])
        assert answer.segments == locally(request_for(PROMPT), ending(7)).segments
        assert answer.trace.server_usage is not None
        assert answer.trace.server_usage.requests == len(fake.bodies)


def test_a_chunk_that_fails_for_good_takes_its_siblings_along() -> None:
    script = follow((13, A, OPEN, B, P20, A), (P20, ASYNC, A), vocabulary_size=SIZE, otherwise=A)

    def chunks_fail(body: Body, pieces: Pieces) -> Pieces | Response:
        return refusal(400, "no chunks here") if body["prompt"][-1] == ASYNC else pieces

    with serving(Fake(script, SIZE, END, token_s=0.01, mischief=chunks_fail)) as fake:
        with pytest.raises(RemoteError, match="no chunks here"):
            write(service_of(fake), [request_for(PROMPT, rules=Rules(max_tokens=4000))])
        until(lambda: fake.live == 0, seconds=20)  # main alone would write for 40


def test_requests_past_the_limit_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MAX_REQUESTS", 2)
    with serving(Fake(WRITES_ABAAB, SIZE, END, token_s=0.01)) as fake:
        answers = write(service_of(fake), [request_for(prompt) for prompt in PROMPTS])
    assert {answer.text for answer in answers} == {"abaab"}
    assert fake.max_live == 2


# Several servers


def test_answers_take_turns_and_each_stays_where_it_began() -> None:
    with serving(abaab()) as first, serving(abaab()) as second:
        write(service_of(first, second), [request_for(prompt) for prompt in PROMPTS])
    first_prompts = {tuple(body["prompt"][:3]) for body in first.bodies}
    second_prompts = {tuple(body["prompt"][:3]) for body in second.bodies}
    assert len(first_prompts) == len(second_prompts) == 3
    assert first_prompts.isdisjoint(second_prompts)


@pytest.mark.parametrize(
    ("mischief", "failed", "requests_to_bad"),
    [
        (refusing(503, "broken"), [False] * 4, 1),  # avoided afterwards
        (EMPTY, [False] * 4, 1),
        (
            EARLY,
            [True, False, False, False],
            1,
        ),  # it had sent tokens: avoided
        (refusing(404, "who?"), [True, False, False, False], 1),
        (refusing(429, "try later"), [True, False] * 2, 6),  # busy: tried again
        (
            refusing(400, "too long"),
            [True, False] * 2,
            2,
        ),  # the request is at fault
    ],
)
def test_one_of_two_servers_fails(
    mischief: Mischief, failed: list[bool], requests_to_bad: int
) -> None:
    async def one_by_one() -> list[str]:
        texts = [""] * len(failed)
        async with aclosing(ReplicaPool(service_of(bad, good, cooldown_s=60))) as pool:
            for number, prompt in enumerate(PROMPTS[:4]):
                with suppress(RemoteError):
                    texts[number] = (await writer(request_for(prompt), pool).run()).text
        return texts

    with serving(abaab()) as bad, serving(abaab()) as good:
        bad.mischief = mischief
        assert asyncio.run(one_by_one()) == ["" if fails else "abaab" for fails in failed]
    assert len(bad.bodies) == requests_to_bad


# The list of models


def listing(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (listing(b"loading", "529 Busy"), r"^no server is ready: .+ status 529: loading$"),
        (listing(b"no", "401 No"), r"refuses the key \(401\)"),
        (listing(b"[" * 200_000), "does not list models"),
        (listing(b'{"data": [3]}'), "does not list models"),
        (listing(b'{"data": []}'), "serves no model, none of them called 'a'"),
        (listing(b'{"data": [{"id": "b"}, {"id": "c"}]}'), "serves 'b', 'c', none of them called"),
        (listing(b'{"data": [{"id": "b"}]}'), "serve different models: 'b' at .+, 'tiny' at"),
        (listing(b" " * 2**21), "no server is ready: .+ its list of models has no end"),
    ],
)
def test_a_broken_list_of_models_is_reported_and_another_server_may_serve(
    words: bytes, message: str
) -> None:
    with serving(abaab()) as good, hanging_up(words) as port:
        urls = [f"http://127.0.0.1:{port}/v1", good.url]
        tried_urls = urls if "different" in message else urls[:1]
        with pytest.raises(PastaError, match=message):
            find_model(tried_urls, ["a"], api_key=None, connect_s=0.3)
        if "no server" in message:
            model = find_model(urls, [], api_key=None, connect_s=0.3)
            assert model == (good.model, good.max_model_len)


@pytest.mark.parametrize("words", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_the_wait_for_a_list_of_models_that_drips_has_a_limit(words: bytes) -> None:
    with hanging_up(words, drip=b" ") as port, pytest.raises(PastaError) as caught:
        find_model([f"http://127.0.0.1:{port}/v1"], [], api_key=None, connect_s=0.2)
    assert str(caught.value).endswith("it did not list its models within 0.2 s")


@pytest.mark.parametrize(
    "url", ["http://a..b/v1", f"http://{'a' * 64}.org/v1", "ftp://a/v1", "http://a/v1?x=1", "a"]
)
def test_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(PastaError, match="is no base URL"):
        checked_url(url)
    assert checked_url("http://[::1]:8000", default_path="/v1") == "http://[::1]:8000/v1"
