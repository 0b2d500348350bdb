"""Annotating through an endpoint: which answers are accepted, and what a bad endpoint costs."""

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.data.annotate.base import AnnotatedRow
from pasta_decoding.data.annotate.llm import AnswerError, accept, by_endpoint, introduction
from pasta_decoding.data.endpoint import Endpoint, EndpointError, chat, open_client
from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError, install_command
from pasta_decoding.lang.check import check, warn
from tests.chatserver import Act, Body, Raw, Script, chat_server, failure, in_turn

PLAIN = "Eat oats for breakfast. Sleep well at night."
GOOD = (
    '<promise topic="diet" tokens="10"/><async>Eat oats for breakfast.</async> '
    '<promise topic="sleep" tokens="10"/><async>Sleep well at night.</async>'
)


def words(text: str) -> int:
    return len(text.split())


def test_a_conversation_begins_with_the_guide_and_seven_answers_that_obey_it() -> None:
    turns = introduction()
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 7]
    tags = ("<promise ", "<async>", "</async>", "<sync/>")
    assert all(tag in turns[0]["content"] for tag in tags)
    assert not any(tag in turn["content"] for turn in turns[1::2] for tag in tags)
    demonstrations = [turn["content"] for turn in turns[2::2]]
    assert [check(text) + warn(text) for text in demonstrations] == [[]] * 7


# Accepted answers


@pytest.mark.parametrize(
    ("answer", "response", "annotated"),
    [
        *(
            (GOOD.replace('tokens="10"', wrong), PLAIN, GOOD)
            for wrong in ('tokens="7"', 'tokens="many"', "tokens=20", 'tokens="990"', "")
        ),
        (GOOD.replace("/><async>", "><async>"), PLAIN, GOOD),
        (GOOD, f"\n {PLAIN}\t\n", f"\n {GOOD}\t\n"),
        (PLAIN, PLAIN, PLAIN),
        (
            '<promise topic="diet" tokens="10"/><async>**Oats**: eat them.</async>',
            "**Oats**: eat them.",
            '**<promise topic="diet" tokens="10"/><async>Oats**: eat them.</async>',
        ),
        (f"{GOOD} Write \\<sync/>.", f"{PLAIN} Write <sync/>.", f"{GOOD} Write \\<sync/>."),
    ],
)
def test_the_text_is_kept_and_promised_lengths_are_counted_whatever_the_model_wrote(
    answer: str, response: str, annotated: str
) -> None:
    assert accept(answer, response, words) == annotated
    assert accept(GOOD, PLAIN, lambda _: 41) == GOOD.replace('"10"', '"50"')


BROKEN = {
    "unclosed-async": GOOD.removesuffix("</async>"),
    "long-topic": GOOD.replace("diet", "what to eat now"),
    "tag-in-chunk": GOOD.replace("oats", "<sync/>oats"),
    "same topic": GOOD.replace("sleep", "diet"),
    "text differs": "I cannot do that.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_refused_by_the_rule_that_it_breaks(kind: str) -> None:
    with pytest.raises(AnswerError) as caught:
        accept(BROKEN[kind], PLAIN, words)
    assert caught.value.kind == kind


# Rows


def rows(count: int, response: str = PLAIN) -> list[Row]:
    return [Row(str(n), "s", f"Question {n}?", response) for n in range(count)]


def results(
    script: Script, plain_rows: Sequence[Row], **settings: Any
) -> tuple[dict[str, AnnotatedRow], list[Body], int]:
    """Annotate with a server that follows `script`: results by id, requests, the most at once."""
    with chat_server(script) as server:
        endpoint = replace(Endpoint(server.base_url, "m", max_retries=0, timeout_s=120), **settings)
        annotated = list(by_endpoint(endpoint, words, plain_rows))
    by_id = {result.row.id: result for result in annotated}
    assert len(by_id) == len(annotated)
    assert by_id.keys() == {row.id for row in plain_rows}
    return by_id, server.bodies, server.busiest


def test_rows_are_annotated_at_the_same_time_and_their_cost_is_counted() -> None:
    together = threading.Barrier(4)

    def script(_number: int, _body: Body) -> Act:
        together.wait(timeout=120)  # nobody is answered before four have asked
        return GOOD

    annotated, bodies, busiest = results(script, rows(20), concurrency=4)
    assert busiest == 4
    assert {(result.row.response, result.rejected) for result in annotated.values()} == {
        (GOOD, None)
    }
    cost = {"requests": 1, "prompt_tokens": 10, "completion_tokens": words(GOOD)}
    assert all(result.cost == cost for result in annotated.values())
    questions = {body["messages"][-1]["content"] for body in bodies}
    assert questions == {f"Question:\n\nQuestion {n}?\n\nResponse:\n\n{PLAIN}" for n in range(20)}


def test_a_wrong_answer_is_asked_for_again_with_the_reason_and_then_stays_plain() -> None:
    other_text = PLAIN.replace("oats", "rice")
    long_topic = BROKEN["long-topic"]
    annotated, bodies, _ = results(in_turn([other_text, long_topic, GOOD]), rows(1))
    result = annotated["0"]
    assert (result.row.response, result.rejected) == (GOOD, None)
    assert result.cost["requests"] == 3
    assert result.cost["retries: text differs"] == 1
    assert result.cost["retries: long-topic"] == 1
    first, reason, second, rule = bodies[2]["messages"][len(bodies[0]["messages"]) :]
    assert (first["content"], second["content"]) == (other_text, long_topic)
    assert "goes on with 'oats for" in reason["content"]
    rule_message = "At line 1, column 1: a topic has at most 3 words. "
    assert rule["content"] == f"{rule_message}Write the whole annotated response again."
    annotated, bodies, _ = results(in_turn([other_text, "", GOOD]), rows(1, f"{PLAIN}<sync/>"))
    result = annotated["0"]
    assert (result.row.response, result.rejected) == (f"{PLAIN}\\<sync/>", "text differs")
    assert bodies[0]["messages"][-1]["content"].endswith("\\<sync/>")


def test_a_row_that_the_endpoint_fails_on_stays_plain_and_the_others_do_not() -> None:
    def script(_number: int, body: Body) -> Act:
        hard = "Question 1?" in body["messages"][-1]["content"]
        return failure(500) if hard else GOOD

    annotated, _, _ = results(script, rows(4))
    reasons = {row_id: result.rejected for row_id, result in annotated.items()}
    assert reasons == {"0": None, "1": "endpoint: status 500", "2": None, "3": None}
    assert annotated["1"].row.response == PLAIN


@pytest.mark.parametrize(("status", "requests"), [(401, 3), (503, 12)])
def test_an_endpoint_that_refuses_or_is_down_ends_the_run_and_keeps_what_was_done(
    status: int, requests: int
) -> None:
    with chat_server(in_turn([GOOD, GOOD, failure(status)])) as server:
        endpoint = Endpoint(server.base_url, "m", concurrency=1, max_retries=0)
        annotated = by_endpoint(endpoint, words, rows(99))
        assert [next(annotated).row.id, next(annotated).row.id] == ["0", "1"]
        with pytest.raises(EndpointError, match=str(status)):
            next(annotated)
        assert len(server.bodies) == requests


def test_a_consumer_may_leave_at_any_time() -> None:
    with chat_server(in_turn([GOOD, Raw(wait_s=30)])) as server:
        annotated = by_endpoint(Endpoint(server.base_url, "m"), words, rows(5))
        next(annotated)
        annotated.close()  # type: ignore[attr-defined]
        assert next(annotated, None) is None


# One request


def ask(endpoint: Endpoint) -> tuple[str, dict[str, int]]:
    async def once() -> tuple[str, dict[str, int]]:
        async with open_client(endpoint) as client:
            question = {"role": "user", "content": "Hello"}
            reply = await chat(client, endpoint, [question], max_tokens=20)
            return reply.text, reply.cost

    return asyncio.run(once())


def test_the_request_says_what_was_asked_and_what_may_pass_by_itself_is_tried_again() -> None:
    bare = json.dumps(
        {"choices": [{"message": {"content": None}, "finish_reason": "stop"}], "usage": {}}
    )
    acts: list[Act] = [failure(429, Retry_After="0.1"), "Good morning", Raw(bare.encode())]
    with chat_server(in_turn(acts)) as server:
        endpoint = Endpoint(server.base_url, "some-model", "secret")
        cost = {"requests": 2, "prompt_tokens": 10, "completion_tokens": 2}
        assert ask(endpoint) == ("Good morning", cost)
        assert ask(endpoint) == ("", {"requests": 1, "prompt_tokens": 0, "completion_tokens": 0})
    question = [{"role": "user", "content": "Hello"}]
    body = {"model": "some-model", "messages": question, "max_tokens": 20, "temperature": 0.0}
    assert server.bodies == [body] * 3
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in repr(endpoint)


PARTS = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Good <think></think>"}]


@pytest.mark.parametrize(
    ("refusals", "settings", "content"),
    [
        (["'max_tokens' is not supported: use 'max_completion_tokens'"],
         {"max_completion_tokens": 20, "temperature": 0.0},
         "<think>\nA greeting </async>.\n</think>\n\nGood <think></think>"),
        (["invalid temperature: only 1 is allowed"], {"max_tokens": 20},
         "A greeting.\n</think>\n\nGood <think></think>"),
        (["temperature", "use max_completion_tokens"], {"max_completion_tokens": 20}, PARTS),
    ],
)  # fmt: skip
def test_a_reasoning_model_has_its_own_settings_and_its_thoughts_are_left_out(
    refusals: list[str], settings: dict[str, Any], content: Any
) -> None:
    errors = (json.dumps({"error": {"message": message}}).encode() for message in refusals)
    reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
    with chat_server(in_turn([*(Raw(error, 400) for error in errors), Raw(reply)])) as server:
        endpoint = Endpoint(server.base_url, "m")
        answers = [ask(endpoint) for _ in range(2)]
    assert {text for text, _ in answers} == {"Good <think></think>"}
    assert [cost["requests"] for _, cost in answers] == [len(refusals) + 1, 1]
    question = [{"role": "user", "content": "Hello"}]
    assert server.bodies[-2:] == [{"model": "m", "messages": question, **settings}] * 2


GARBAGE = (b"\xff\xfe", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 5}}]}')
THOUGHT = b'{"choices": [{"message": {"content": "<think>Hm"}, "finish_reason": "length"}]}'


@pytest.mark.parametrize(
    ("act", "kind", "fatal", "message"),
    [
        (Raw(wait_s=30), "timeout", False, "URL did not answer within 1 s (tries: 1)"),
        (failure(500), "status 500", False, "URL failed with status 500: "),
        (Raw(hang_up=True), "connection", False, "URL broke the connection: "),
        (failure(401), "status 401", True, "URL refuses the key (401); it is read from PASTA_"),
        (failure(404), "status 404", True, "URL failed with status 404: "),
        (Raw(THOUGHT), "no answer", False, "URL thought for 20 tokens and did not answer"),
        *((Raw(body), "no completion", False, "URL sent no chat completion: ") for body in GARBAGE),
    ],
)
def test_what_does_not_pass_is_named(act: Raw, kind: str, message: str, *, fatal: bool) -> None:
    with chat_server(in_turn([act])) as server:
        with pytest.raises(EndpointError) as caught:
            ask(Endpoint(server.base_url, "m", max_retries=0, timeout_s=1))
        assert str(caught.value).replace(server.base_url, "URL").startswith(message)
    assert (caught.value.kind, caught.value.fatal) == (kind, fatal)


def test_an_endpoint_that_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server(in_turn(["x"])) as server:
        gone = Endpoint(server.base_url, "m", max_retries=0)
    with pytest.raises(EndpointError, match=r"cannot be reached: .* \(tries: 1\)") as caught:
        ask(gone)
    assert caught.value.fatal
    for url in ("localhost:8000/v1", "ftp://here/v1", "", "http://host:abc/v1", "http://[::1/v1"):
        with pytest.raises(PastaError, match="is no base URL"):
            ask(Endpoint(url, "m"))
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(PastaError, match="asking an endpoint needs the package openai") as missing:
        ask(gone)
    assert missing.value.hint == install_command("endpoint")
