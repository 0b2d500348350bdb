"""What clients get: the official client, streamed and whole, equal to what the decoder writes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampler, Sampling
from tests.server.running import HELLO, MODEL, Running, running
from tests.server.scripts import saying, with_engine

PROMPTS = ["Hello", "What is 2 + 2?", "Name three birds.", "<async>tags</async>", "é 🎈 ü", "a\nb"]
TOKENS = 48


def decoded(server: Running, prompt: str, sampling: Sampling | None = None, **rules: Any) -> Answer:
    settings = Rules(**{"max_tokens": TOKENS} | rules)
    request = server.decoder.request(prompt, settings, sampling or Sampling())
    return server.decoder.answer(request)


def whole(server: Running, prompt: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS} | changes
    messages: list[Any] = [{"role": "user", "content": prompt}]
    return server.client().chat.completions.create(messages=messages, **settings)


def streamed(server: Running, prompt: str, **settings: Any) -> list[Any]:
    return list(whole(server, prompt, stream=True, **settings))


def cost(reply: Any) -> dict[str, Any]:
    """Return the usage, without what the cache happened to hold of the prompt."""
    found: dict[str, Any] = reply.usage.model_dump()
    assert found.pop("prompt_tokens_details")["cached_tokens"] < found["prompt_tokens"]
    return found


def text_of(chunks: list[Any], choice: int = 0) -> str:
    pieces = (one for chunk in chunks for one in chunk.choices if one.index == choice)
    return "".join(piece.delta.content or "" for piece in pieces)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_stream_plain_reply_and_decoder_agree_to_the_byte(prompt: str, server: Running) -> None:
    found = text_of(streamed(server, prompt)), whole(server, prompt).choices[0].message.content
    server.wait_until_idle()
    answer = decoded(server, prompt)
    assert found == (answer.text, answer.text)


def test_the_plain_reply_is_what_the_official_client_expects(server: Running) -> None:
    got = whole(server, "Hello")
    server.wait_until_idle()
    answer = decoded(server, "Hello")
    assert isinstance(got, openai.types.chat.ChatCompletion)
    assert got.id.startswith("chatcmpl-")
    assert got.object == "chat.completion"
    assert got.model == MODEL
    (choice,) = got.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == ("length" if answer.hit_limit else "stop")
    assert got.usage is not None
    assert got.usage.prompt_tokens == answer.trace.prompt_tokens
    assert got.usage.completion_tokens == answer.fed_tokens
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    ours = got.usage.model_extra or {}
    assert ours == {
        "plain_tokens": server.decoder.plain_tokens(answer.text),
        "critical_path": answer.critical_path,
        "threads": 1 + answer.chunks,
        "trimmed_tokens": answer.trimmed_tokens,
    }


def test_a_stream_begins_with_the_role_and_ends_with_a_reason_and_the_usage(
    server: Running,
) -> None:
    chunks = streamed(server, "Hello", stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [one.finish_reason for chunk in chunks for one in chunk.choices]
    assert set(reasons[:-1]) == {None}
    assert reasons[-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert cost(chunks[-1]) == cost(whole(server, "Hello"))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_parallel_decoding_there_is_one_thread(server: Running) -> None:
    got = whole(server, "Hello", extra_body={"pasta_parallel": False})
    server.wait_until_idle()
    assert got.choices[0].message.content == decoded(server, "Hello", parallel=False).text
    assert got.usage.threads == 1


def test_top_k_of_one_is_greedy_and_none_keeps_all(server: Running) -> None:
    def text(temperature: float, **ours: int) -> str:
        got = whole(server, "Hello", temperature=temperature, seed=7, extra_body=ours)
        return str(got.choices[0].message.content)

    greedy, drawn = text(0), text(1)
    assert text(1, top_k=1) == greedy != drawn
    assert text(1, top_k=-1) == text(1, top_k=0) == drawn


def test_choices_differ_and_a_seed_repeats_them(server: Running) -> None:
    settings: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "seed": 7, "n": 3}
    first, again = (whole(server, "Hello", **settings) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    chunks = streamed(server, "Hello", **settings)
    assert [text_of(chunks, choice) for choice in range(3)] == texts
    server.wait_until_idle()
    ids = server.decoder.prompt_ids("Hello", TOKENS)
    sampler = Sampler(Sampling(temperature=1, top_p=0.9, seed=7), request=2)
    request = server.decoder.request_of(ids, Rules(max_tokens=TOKENS), sampler)
    assert server.decoder.answer(request).text == texts[2]


def test_a_completion_goes_on_from_text_or_from_token_ids(server: Running) -> None:
    client = server.client()
    ids = server.decoder.encoder.encode_plain("Once upon")
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(prompt="Once upon", **settings)
    same = client.completions.create(prompt=ids, **settings)
    both = client.completions.create(prompt=["Once upon", "Hello"], n=2, **settings)
    stream = client.completions.create(prompt="Once upon", stream=True, **settings)
    assert text.choices[0].text == same.choices[0].text == both.choices[1].text
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[0].text
    assert text.usage is not None
    assert text.usage.prompt_tokens == len(ids)
    server.wait_until_idle()
    request = server.decoder.request_of(tuple(ids), Rules(max_tokens=12), Sampler(Sampling()))
    assert server.decoder.answer(request).text == text.choices[0].text


def test_content_in_parts_and_the_role_developer_are_understood(server: Running) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        },
    ]
    plain: list[Any] = [{"role": "system", "content": "Be kind."}, *HELLO]
    first, second = (
        server.client().chat.completions.create(
            model=MODEL, messages=one, max_completion_tokens=8, temperature=0
        )
        for one in (messages, plain)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert cost(first) == cost(second)


def test_the_models_are_listed(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_live_events_tell_what_each_thread_does(decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        chunks = streamed(server, "Hello", stream_options={"pasta_events": True})
        server.wait_until_idle()
    assert text_of(chunks) == "One: an apple Done."
    found = [event for chunk in chunks for event in events_of(chunk)]
    assert [event["type"] for event in found if event["type"] != "delta"] == [
        "opened",
        "closed",
        "synced",
        "finished",
    ]
    opened = next(event for event in found if event["type"] == "opened")
    assert (opened["thread"], opened["topic"]) == (1, "fruit")
    by_thread = {
        thread: "".join(e["text"] for e in found if e["type"] == "delta" and e["thread"] == thread)
        for thread in (MAIN, 1)
    }
    assert by_thread == {MAIN: "One:  Done.", 1: "an apple"}
    steps = [event["step"] for event in found]
    assert steps == sorted(steps)


def events_of(chunk: Any) -> list[dict[str, Any]]:
    return [
        event for choice in chunk.choices for event in choice.model_extra.get("pasta_events", [])
    ]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("apple", "One: an "),
        (["Done", "One"], ""),
        (["le D"], "One: an app"),
        (["nothing like it"], "One: an apple Done."),
        ("fruit", "One: an apple Done."),
    ],
)
def test_stop_strings_cut_the_text_in_reading_order(
    stop: str | list[str], text: str, decoder: LocalDecoder
) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        plain = whole(server, "Hello", stop=stop)
        chunks = streamed(server, "Hello", stop=stop, stream_options={"include_usage": True})
        server.wait_until_idle()
    assert plain.choices[0].message.content == text
    assert plain.choices[0].finish_reason == "stop"
    assert text_of(chunks) == text
    assert cost(chunks[-1]) == cost(plain)


def test_what_is_sent_is_server_sent_events(server: Running) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 4, "temperature": 0}
    got = server.ask("/v1/chat/completions", body)
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = got.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
