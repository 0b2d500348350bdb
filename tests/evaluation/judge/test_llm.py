"""A judge behind an endpoint: both orders, what counts as a verdict, and servers that misbehave."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pasta_decoding.data.endpoint import Endpoint, EndpointError, Reply
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.judge.llm import LlmJudge, read_verdict
from tests.chatserver import Act, Body, ChatServer, Raw, chat_server, completion, failure

PROMPTS, GOOD, BAD = ["p0", "p1"], ["good 0", "good 1"], ["bad 0", "bad 1"]

Ask = Callable[..., tuple[list[float | None], LlmJudge, ChatServer]]


def shown_first(body: Body) -> str:
    text: str = body["messages"][0]["content"]
    return text.partition("Answer A:\n<answer>\n")[2].partition("\n</answer>")[0]


def sensible(_number: int, body: Body) -> Act:
    return "A" if shown_first(body).startswith("good") else "B"


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Return a function that lets a server with this script judge two pairs."""

    def run(
        script: Callable[[int, Body], Act],
        *,
        logprobs: bool = True,
        model: str = "m",
        timeout_s: float = 120,
    ) -> tuple[list[float | None], LlmJudge, ChatServer]:
        with chat_server(script) as server:
            endpoint = Endpoint(
                server.base_url, model, api_key="k", timeout_s=timeout_s, max_retries=1
            )
            judge = LlmJudge(endpoint, tmp_path / "verdicts.jsonl", logprobs=logprobs)
            return judge.prefer(PROMPTS, GOOD, BAD), judge, server

    return run


def test_both_orders_are_asked_and_a_judge_that_sees_quality_is_sure(ask: Ask) -> None:
    said, judge, server = ask(sensible)
    assert said == [1.0, 1.0]
    assert sorted(map(shown_first, server.bodies)) == ["bad 0", "bad 1", "good 0", "good 1"]
    assert not judge.failures


def test_a_judge_that_always_takes_the_first_answer_says_nothing(ask: Ask) -> None:
    said, _judge, _server = ask(lambda _number, _body: "A")
    assert said == [0.5, 0.5]


def alternatives(**logprobs: float) -> Raw:
    top = [{"token": name, "logprob": value} for name, value in logprobs.items()]
    first = {"token": "A", "logprob": -0.1, "top_logprobs": top}
    return Raw(completion("A", logprobs={"content": [first]}))


def test_the_first_tokens_probabilities_are_read_where_the_endpoint_has_them(ask: Ask) -> None:
    said, _judge, server = ask(
        lambda _number, _body: alternatives(A=math.log(0.6), B=math.log(0.2))
    )
    assert said == [pytest.approx(0.5)] * 2
    assert all(body["top_logprobs"] == 20 for body in server.bodies)


def test_an_endpoint_need_not_be_asked_for_probabilities(ask: Ask) -> None:
    said, _judge, server = ask(sensible, logprobs=False)
    assert said == [1.0, 1.0]
    assert all("logprobs" not in body for body in server.bodies)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply("A"), 1.0),
        (Reply(" B."), 0.0),
        (Reply("Answer B is better"), 0.0),
        (Reply("A or B"), None),
        (Reply("a"), None),
        (Reply("Both"), None),
        (Reply(""), None),
        (Reply("B", top_logprobs={name: math.log(0.3) for name in ("A", " A", "B")}), 2 / 3),
        (Reply("B", top_logprobs={"The": math.log(0.8), "A": math.log(0.2)}), 0.0),
    ],
)
def test_what_counts_as_a_verdict(reply: Reply, expected: float | None) -> None:
    verdict = read_verdict(reply)
    assert verdict == (None if expected is None else pytest.approx(expected, abs=1e-3))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("I cannot decide.", "a reply without a verdict"),
        (failure(500), "failed with status 500"),
        (failure(429, retry_after="0"), "failed with status 429"),
        (Raw(b"<html>", headers={"Content-Type": "text/html"}), "sent no chat completion"),
        (Raw(hang_up=True), "broke the connection"),
        (Raw(wait_s=30.0), "did not answer within 1 s"),
    ],
)
def test_one_order_without_a_verdict_is_a_missing_one_and_no_tie(
    act: Act, reason: str, ask: Ask
) -> None:
    def script(number: int, body: Body) -> Act:
        return act if shown_first(body) == "bad 1" else sensible(number, body)

    slow = isinstance(act, Raw) and act.wait_s > 0
    said, judge, _server = ask(script, timeout_s=1.0 if slow else 120)
    assert said == [1.0, None]
    [failed] = judge.failures
    assert reason in failed
    assert judge.failures[failed] == 1


def test_verdicts_are_kept_and_only_missing_ones_are_asked_again(ask: Ask) -> None:
    def moody(number: int, body: Body) -> Act:
        return "Hm." if shown_first(body) == "bad 1" else sensible(number, body)

    ask(moody)
    said, _judge, server = ask(sensible)
    assert said == [1.0, 1.0]
    assert list(map(shown_first, server.bodies)) == ["bad 1"]
    _said, _judge, server = ask(sensible)
    assert server.bodies == []


def test_another_model_is_asked_anew(ask: Ask) -> None:
    ask(sensible)
    _said, _judge, server = ask(sensible, model="other")
    assert len(server.bodies) == 4


def test_a_kill_in_the_middle_of_a_line_loses_that_line_alone(ask: Ask, tmp_path: Path) -> None:
    ask(sensible)
    path = tmp_path / "verdicts.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    said, _judge, server = ask(sensible)
    assert said == [1.0, 1.0]
    assert len(server.bodies) == 1
    assert len(path.read_text().splitlines()) == 4


def test_a_file_of_something_else_is_refused_and_left_alone(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"id": 3}\nhalf')
    with pytest.raises(PastaError, match=r"verdicts\.jsonl:1: not a verdict of this judge"):
        ask(sensible)
    assert path.read_text() == '{"id": 3}\nhalf'


def test_a_refused_key_stops_everything(ask: Ask) -> None:
    with pytest.raises(EndpointError, match="refuses the key") as found:
        ask(lambda _number, _body: failure(401))
    assert found.value.fatal


def test_braces_in_an_answer_are_shown_as_they_are(tmp_path: Path) -> None:
    with chat_server(lambda _number, _body: "A") as server:
        endpoint = Endpoint(server.base_url, "m", api_key="k")
        LlmJudge(endpoint, tmp_path / "v.jsonl").prefer(["{a} {b}"], ["{prompt}"], [r"\1 {a}"])
        [text] = [
            body["messages"][0]["content"]
            for body in server.bodies
            if shown_first(body) == "{prompt}"
        ]
    assert "<instruction>\n{a} {b}\n</instruction>" in text
    assert "<answer>\n\\1 {a}\n</answer>" in text
