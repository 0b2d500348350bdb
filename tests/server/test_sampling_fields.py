"""What other servers take beside temperature: obeyed as they have it, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pasta_decoding.runtime.local import LocalDecoder
from tests.server.running import HELLO, MODEL, Running, running
from tests.server.scripts import saying, with_engine

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0}


def text(server: Running, **changes: Any) -> str:
    got = server.ask(CHAT, GOOD | changes)
    assert got.status == 200, got.body
    return str(got.json["choices"][0]["message"]["content"])


def test_a_bias_brings_a_token_or_keeps_it_away(server: Running) -> None:
    token = server.decoder.encoder.encode_text("a")[0]
    assert text(server, logit_bias={str(token): 100}, max_tokens=5) == "aaaaa"
    assert "a" not in text(server, logit_bias={str(token): -100}).split()


def test_penalties_and_min_p_change_the_answer_and_neutral_ones_do_not(server: Running) -> None:
    plain = text(server)
    neutral = {"min_p": 0.2, "repetition_penalty": 1.0, "presence_penalty": 0}
    assert text(server, **neutral) == plain
    assert text(server, frequency_penalty=2, presence_penalty=2, repetition_penalty=2) != plain
    sampled = {"temperature": 2, "seed": 5}
    assert text(server, **sampled, min_p=1) == plain != text(server, **sampled)


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias names the id 99999"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty: Input should be"),
        ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty: Input should be"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty: Input should be"),
        ({"min_p": 2}, "min_p", "min_p: Input should be"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: Input should"),
        ({"top_logprobs": 2}, None, "top_logprobs is only allowed when logprobs is true"),
        ({"logprobs": 3}, "logprobs", "logprobs: Input should be a valid boolean"),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    change: dict[str, Any], param: str | None, reason: str, server: Running
) -> None:
    got = server.ask(CHAT, GOOD | change)
    assert (got.status, got.error["type"]) == (400, "invalid_request_error")
    assert got.error["param"] == param
    assert got.error["message"].startswith(reason)


def test_logprobs_are_those_of_the_text_in_reading_order(decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        asked = GOOD | {"logprobs": True, "top_logprobs": 3, "max_tokens": 60}
        whole = server.ask(CHAT, asked).json["choices"][0]
        chunks = list(
            server.client().chat.completions.create(**asked, stream=True, stream_options=None)
        )
        server.wait_until_idle()
    tokens = whole["logprobs"]["content"]
    assert whole["message"]["content"] == "One: an apple Done."
    assert "".join(token["token"] for token in tokens) == "One: an apple Done."
    for token in tokens:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] <= 0
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert len(token["top_logprobs"]) == 3
    told = [one.choices[0].logprobs for one in chunks if one.choices]
    streamed = [token.token for one in told if one for token in one.content or []]
    assert streamed == [token["token"] for token in tokens]


def test_logprobs_of_a_distribution_sum_up_to_one_at_most(server: Running) -> None:
    asked = GOOD | {"logprobs": True, "top_logprobs": 20, "temperature": 1, "seed": 1}
    [choice] = server.ask(CHAT, asked).json["choices"]
    for token in choice["logprobs"]["content"]:
        shares = [math.exp(one["logprob"]) for one in token["top_logprobs"]]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.0001


def test_completions_tell_logprobs_with_their_places(server: Running) -> None:
    asked = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    [choice] = server.ask("/v1/completions", asked).json["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    ends = [sum(map(len, told["tokens"][:n])) for n in range(len(told["tokens"]))]
    assert told["text_offset"] == ends
    assert all(len(one) in (2, 3) for one in told["top_logprobs"])
    bare = server.ask("/v1/completions", asked | {"logprobs": 0}).json["choices"][0]["logprobs"]
    assert [list(one) for one in bare["top_logprobs"]] == [[one] for one in bare["tokens"]]


def test_a_stop_cuts_the_logprobs_too(decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        whole = server.ask(CHAT, GOOD | {"logprobs": True, "stop": "apple"}).json["choices"][0]
        server.wait_until_idle()
    assert whole["message"]["content"] == "One: an "
    text = "".join(token["token"] for token in whole["logprobs"]["content"])
    assert text.startswith("One: an")
    assert "apple" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", "root ::= x"),
        ("json_schema", {"type": "object"}),
        ("format", "json"),
        ("repeat_penalty", 1.1),
        ("n_predict", 5),
        ("stop_regex", "x+"),
        ("regex", "x+"),
        ("max_new_tokens", 5),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("options", {"num_ctx": 5}),
        ("add_generation_prompt", False),
    ],
)
def test_fields_of_other_servers_that_change_an_answer_are_refused_by_name(
    name: str, value: Any, server: Running
) -> None:
    got = server.ask(CHAT, GOOD | {name: value})
    assert (got.status, got.error["param"]) == (400, name)
    assert got.error["code"] == "unsupported_parameter"
    assert got.error["message"].startswith(f"{name} is not supported: ")
