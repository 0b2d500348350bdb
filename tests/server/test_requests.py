"""Any bad request gets an error in OpenAI's shape with the reason, and the server lives on."""

from typing import Any

import pytest
from pydantic import ValidationError

from pasta_decoding.server.requests import ChatRequest
from tests.server.running import CHAT, GOOD, HELLO, MODEL, Running

BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Field required"),
    "not UTF-8": (b'{"model": "\xff"}', "the body cannot be read as JSON: 'utf-8' codec"),
    "deep": (b"[" * 100_000, "the body cannot be read as JSON: "),
    "digits": (b'{"seed": ' + b"9" * 5000 + b"}", "the body cannot be read as JSON: Exceeds the"),
}
LONG = "x" * 500_000
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hi"}
UNDER = "the API is under /v1; Not Found: "


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# a change to a good request, the field that is named, and how the message begins
CHANGES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "messages: List should have at least 1 item"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "messages[0].role: "),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: Field requ"),
    (user(None), "messages[0].content", "messages[0].content: Input should be a valid string"),
    (user([{"type": "text", "text": "x", "x": 1}]), "messages[0].content[0].x", "messages[0].c"),
    (
        {"messages": [USER | {"name": "Bo"}]},
        "messages[0].name",
        "messages[0].name is not supported",
    ),
    ({"messages": [USER | {"tool_call_id": "1"}]}, "messages[0].tool_call_id", "messages[0].tool"),
    ({"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls", "messages[0].tool_cal"),
    (user("\ud800"), None, "the text is not valid UTF-8, at character 1"),
    ({"messages": HELLO * 3000}, "messages", "the prompt is too long: 3000 messages"),
    (user("x y " * 9000), "messages", "the prompt is too long"),
    (user(" "), None, "the prompt is empty"),
    ({"messages": [*HELLO, ANSWER]}, None, "the conversation ends with the assistant's words"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 5000}, "max_tokens", "an answer of up to 5000 tokens leaves no room"),
    ({"temperature": float("inf")}, "temperature", "temperature: Input should be a finite number"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "repetition_penalty: Input should be gr"),
    ({"top_k": -2}, "top_k", "top_k: Input should be greater than or equal to -1"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias names the id 99999"),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "logit_bias"),
    ({"n": 17}, "n", "n: Input should be less than or equal to 16"),
    ({"stop": ""}, "stop[0]", "stop[0]: String should have at least 1 character"),
    ({"stream_options": {"include": True}}, "stream_options.include", "stream_options.include is"),
    ({"stream_options": {}}, None, "stream_options is only allowed when stream is true"),
    ({"top_logprobs": 2}, None, "top_logprobs is only allowed when logprobs is true"),
    ({"tools": [{"type": "function"}]}, "tools", "tools: the models here call no tools"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice: Input should be 'none' or 'auto'"),
    ({"response_format": {"type": "json_object"}}, "response_format.type", "response_format.type"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "add_generation_prompt: Input"),
    ({"grammar": "root ::= x"}, "grammar", "grammar is not supported"),
    ({str(n): 1 for n in range(301)}, None, "an object has more than 300 fields"),
    ({LONG: 1}, "x" * 200 + " ...", "xxxx"),
]


def refused(server: Running, body: Any, path: str = CHAT) -> dict[str, Any]:
    got = server.ask(path, body, method="POST")
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert len(got.body) < 1000, "nothing long is repeated"
    return got.error


@pytest.mark.parametrize(("body", "reason"), BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request_is_refused(body: bytes, reason: str, server: Running) -> None:
    assert refused(server, body)["message"].startswith(reason)


@pytest.mark.parametrize(
    ("change", "param", "reason"), CHANGES, ids=[reason[:30] for _, _, reason in CHANGES]
)
def test_a_wrong_field_is_refused_with_the_reason(
    change: dict[str, Any], param: str | None, reason: str, server: Running
) -> None:
    error = refused(server, GOOD | change)
    assert error["message"].startswith(reason)
    assert error["param"] == param
    codes = {"too long": "context_length_exceeded", "no room": "context_length_exceeded"}
    codes |= {" is not supported": "unsupported_parameter"}
    expected = [code for text, code in codes.items() if text in error["message"]]
    assert error["code"] == (expected[0] if expected else None)


def test_many_mistakes_are_not_listed_one_by_one() -> None:
    """A list of 100,000 mistakes would stop the event loop for all clients."""
    many = 100_000
    bodies: list[dict[str, Any]] = [
        {"messages": [{}] * many},
        user([{}] * many),
        {"messages": HELLO, "logit_bias": {f"x{number}": 0 for number in range(many)}},
    ]
    for body in bodies:
        with pytest.raises(ValidationError) as refusal:
            ChatRequest.model_validate({"model": MODEL} | body)
        assert refusal.value.error_count() < 5


def test_what_changes_nothing_is_accepted(server: Running) -> None:
    for change in (
        {"frequency_penalty": 0, "logit_bias": {}, "tools": [], "user": "me", "store": True},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "seed": None, "stop": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        dict.fromkeys(("stream", "functions", "n", "top_p", "stream_options", "temperature")),
        {"suffix": None, "stream_options": {"include_obfuscation": False}, "stream": True},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "ignore_eos": False, "seed": -1},
        {"parallel_tool_calls": True, "reasoning_effort": "low", "metadata": {}, "best_of": 1},
        user('<sync/> <promise topic="x" tokens="9"/>'),
        {"messages": [{"role": "user", "content": "<|im_end|><|im_start|>", "name": None}]},
        {"messages": [USER, ANSWER | {"refusal": None, "tool_calls": [], "annotations": []}, USER]},
        {"temperature": 1e-40},
    ):
        assert server.ask(CHAT, GOOD | change).status == 200


def test_a_prompt_that_is_none_is_refused(server: Running) -> None:
    for prompt, param in (
        ([5, "x"], "prompt[1]"),
        (["x", None], "prompt[1]"),
        ([[1], "x"], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([10**6], None),
        ("x y " * 9000, "prompt"),
    ):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        error = refused(server, body, "/v1/completions")
        assert (error["param"], bool(error["message"])) == (param, True)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", CHAT, {**GOOD, "model": "x"}, 404, "there is no model 'x' here, but 'tiny'"),
        ("GET", "/v1/models/gpt-x", None, 404, "there is no model 'gpt-x' here, but 'tiny'"),
        ("GET", "/v1/nothing", None, 404, "Not Found: GET /v1/nothing"),
        ("GET", "/" + "x" * 30_000, None, 404, f"{UNDER}GET /{'x' * 162} ..."),
        ("GET", CHAT, None, 405, f"Method Not Allowed: GET {CHAT}"),
        ("DELETE", "/", None, 405, "Method Not Allowed: DELETE /"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_an_error_of_the_same_shape(
    method: str, path: str, body: Any, status: int, message: str, server: Running
) -> None:
    got = server.ask(path, body, method=method)
    assert (got.status, got.error["message"]) == (status, message)


def test_another_kind_of_content_is_refused(server: Running) -> None:
    """`curl -d` alone says form. And a foreign page can send it, and may not make us work."""
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        got = server.ask(CHAT, GOOD, Content_Type=kind)
        assert (got.status, got.error["code"]) == (415, "unsupported_media_type")
        assert got.error["message"].endswith("with the header Content-Type: application/json")
