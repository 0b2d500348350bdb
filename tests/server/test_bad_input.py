"""Whatever is sent, the answer is an error in OpenAI's shape with the reason, and life goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running import HELLO, MODEL, Running

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0}
DEEP = b"[" * 100_000

BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Field required"),
    "cut off": (b'{"model": ', "the body is not JSON: Expecting value at character 10"),
    "not UTF-8": (b'{"model": "\xff"}', "the body is not JSON in UTF-8"),
    "a list": (b"[]", "Input should be a valid dictionary or object to extract fields from"),
    "deep": (DEEP, "the body is nested too deeply"),
}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": []}, "messages: List should have at least 1 item"),
    "messages.": ({"messages": "Hello"}, "messages: Input should be a valid list"),
    "role": (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "messages[0].role: Input should be 'system', 'developer', 'user' or 'assistant'",
    ),
    "content": ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
    "surrogate": (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "the text is not valid UTF-8, at character 1",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type: Input should be 'text'",
    ),
    "no content": (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content: Input should be a valid string",
    ),
    "many": ({"messages": HELLO * 3000}, "the prompt is too long: 3000 messages"),
    "empty": ({"messages": [{"role": "user", "content": " "}]}, "the prompt is empty."),
    "order": (
        {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}]},
        "the conversation ends with the assistant's words",
    ),
    "max_tokens": ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1"),
    "max_tokens.": ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    "max_tokens..": ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    "too many": ({"max_tokens": 5000}, "an answer of up to 5000 tokens leaves no room"),
    "huge": ({"max_tokens": 10**30}, "max_tokens: Input should be less than"),
    "long": (
        {"messages": [{"role": "user", "content": "x" * 9000}]},
        "the prompt is too long",
    ),
    "temperature": ({"temperature": -1}, "temperature: Input should be greater than or equal"),
    "infinite": ({"temperature": float("inf")}, "temperature: Input should be a finite number"),
    "top_p": ({"top_p": 0}, "top_p: Input should be greater than 0"),
    "top_k": ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
    "seed": ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
    "n": ({"n": 0}, "n: Input should be greater than or equal to 1"),
    "n.": ({"n": 1000}, "n: Input should be less than or equal to 16"),
    "stop": ({"stop": ""}, "stop[0]: String should have at least 1 character"),
    "stop.": ({"stop": [1]}, "stop[0]: Input should be a valid string"),
    "stop..": ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
    "stream": ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    "options": ({"stream_options": {}}, "stream_options is only allowed when stream is true"),
    "tools": ({"tools": [{"type": "function"}]}, "tools is not supported"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
}


@pytest.mark.parametrize(("body", "reason"), BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request_is_refused(body: bytes, reason: str, server: Running) -> None:
    got = server.ask(CHAT, body, method="POST")
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert got.error["message"].startswith(reason)


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_wrong_field_is_refused_with_the_reason(
    change: dict[str, Any], reason: str, server: Running
) -> None:
    got = server.ask(CHAT, GOOD | change)
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert got.error["message"].startswith(reason)


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 0, "logit_bias": {}, "tools": [], "user": "me", "store": True},
        {"response_format": {"type": "text"}, "tool_choice": "none", "seed": None, "stop": None},
        {"stream": None, "n": None, "top_p": None, "stream_options": None, "temperature": None},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "ignore_eos": False},
        {"messages": [{"role": "user", "content": '<sync/> <promise topic="x" tokens="9"/>'}]},
        {"messages": [{"role": "user", "content": "<|im_end|><|im_start|>", "name": "x"}]},
    ],
)
def test_what_changes_nothing_is_accepted(change: dict[str, Any], server: Running) -> None:
    assert server.ask(CHAT, GOOD | change).status == 200


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([5, "x"], "prompt[1]"),
        (["x", 5], "prompt[1]"),
        (["x", None], "prompt[1]"),
        (["x"] * 17, "prompt"),
        ([[1], "x"], "prompt[1]"),
        ([[1]] * 17, "prompt"),
        ([-1], "prompt[0]"),
        ([10**6], None),
        (None, "prompt"),
        (7, "prompt"),
        ({"a": 1}, "prompt"),
    ],
)
def test_a_prompt_that_is_none_is_refused(
    prompt: object, param: str | None, server: Running
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    got = server.ask("/v1/completions", body)
    assert got.status == 400
    assert got.error["param"] == param
    assert got.error["message"]


def test_an_unknown_model_is_404_and_the_right_one_is_named(server: Running) -> None:
    got = server.ask(CHAT, GOOD | {"model": "gpt-x"})
    assert (got.status, got.error["code"]) == (404, "model_not_found")
    assert got.error["message"] == f"there is no model 'gpt-x' here, but {MODEL!r}"
    assert server.ask("/v1/models/gpt-x").status == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "there is nothing at /v1/nothing"),
        ("GET", CHAT, 405, f"GET is not allowed at {CHAT}"),
        ("DELETE", "/", 405, "DELETE is not allowed at /"),
    ],
)
def test_other_places_are_errors_of_the_same_shape(
    method: str, path: str, status: int, message: str, server: Running
) -> None:
    got = server.ask(path, method=method)
    assert (got.status, got.error["message"]) == (status, message)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_another_kind_of_content_is_refused(kind: str, server: Running) -> None:
    """`curl -d` alone says form. And a foreign page can send it, and may not make us work."""
    got = server.ask(CHAT, GOOD, Content_Type=kind)
    assert (got.status, got.error["code"]) == (415, "unsupported_media_type")
    assert got.error["message"].endswith("with the header Content-Type: application/json")
