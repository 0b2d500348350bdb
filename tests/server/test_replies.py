"""Replies to the official client: streamed and plain, they are equal to the decoder's answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.server.running import CHAT, GOOD, MODEL, Running, running, saying, with_engine

TOKENS = 48


def complete_chat(server: Running, prompt: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS} | changes
    messages: list[Any] = [{"role": "user", "content": prompt}]
    return server.client().chat.completions.create(messages=messages, **settings)


def streamed(server: Running, prompt: str, **settings: Any) -> list[Any]:
    return list(complete_chat(server, prompt, stream=True, **settings))


def text(server: Running, **changes: Any) -> str:
    return server.ask(CHAT, GOOD | {"max_tokens": 24} | changes).text


def cost(reply: Any) -> dict[str, Any]:
    """Return the usage without cached tokens, which depend on earlier requests."""
    usage: dict[str, Any] = reply.usage.model_dump()
    assert usage.pop("prompt_tokens_details")["cached_tokens"] < usage["prompt_tokens"]
    return usage


def text_of(chunks: list[Any], choice: int = 0) -> str:
    pieces = (piece for chunk in chunks for piece in chunk.choices if piece.index == choice)
    return "".join(piece.delta.content or "" for piece in pieces)


@pytest.mark.parametrize("prompt", ["Hello", "<async>tags</async>", "é 🎈 ü"])
def test_stream_whole_reply_and_decoder_agree_to_the_byte(prompt: str, server: Running) -> None:
    streamed_text = text_of(streamed(server, prompt))
    plain_reply = complete_chat(server, prompt)
    server.wait_until_idle()
    request = server.decoder.request(prompt, Rules(max_tokens=TOKENS), SamplingParams())
    answer = server.decoder.answer(request)
    [choice] = plain_reply.choices
    assert streamed_text == choice.message.content == answer.text
    assert choice.finish_reason == answer.finish_reason
    assert cost(plain_reply) == {
        "prompt_tokens": answer.trace.prompt_tokens,
        "completion_tokens": answer.fed_tokens,
        "total_tokens": answer.trace.prompt_tokens + answer.fed_tokens,
        "completion_tokens_details": None,
        "plain_tokens": server.decoder.plain_tokens(answer.text),
        "critical_path": answer.critical_path,
        "threads": 1 + answer.chunks,
        "trimmed_tokens": answer.trimmed_tokens,
    }


def test_a_stream_is_events_from_the_role_to_a_reason_and_the_usage(server: Running) -> None:
    raw = server.ask(CHAT, GOOD | {"stream": True})
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.body.startswith(b"data: {")
    assert raw.body.endswith(b"\n\ndata: [DONE]\n\n")
    chunks = streamed(server, "Hello", stream_options={"include_usage": True})
    first = {"role": "assistant", "content": ""}
    assert chunks[0].choices[0].delta.model_dump(exclude_unset=True) == first
    reasons = [piece.finish_reason for chunk in chunks for piece in chunk.choices]
    assert set(reasons[:-1]) == {None}
    assert reasons[-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert cost(chunks[-1]) == cost(complete_chat(server, "Hello"))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_fields_say_how_tokens_are_chosen(server: Running) -> None:
    """Each field is obeyed, and its neutral value changes nothing."""
    plain = text(server)
    [token] = server.decoder.encoder.encode_text("a")
    assert text(server, min_p=0.2, repetition_penalty=1.0, presence_penalty=0) == plain
    assert text(server, frequency_penalty=2, presence_penalty=2, repetition_penalty=2) != plain
    assert text(server, logit_bias={str(token): 100}, max_tokens=5) == "aaaaa"
    drawn = text(server, temperature=2, seed=5)
    assert drawn == text(server, temperature=2, seed=5, top_k=-1)
    assert text(server, temperature=None) == text(server, temperature=1e-40) == plain
    for neutral in ({"min_p": 1}, {"top_k": 1}, {"top_p": 1e-9}):
        assert text(server, temperature=2, seed=5, **neutral) == plain != drawn
    assert text(server, temperature=2, seed=-1) != text(server, temperature=2, seed=-1)


def test_choices_differ_and_a_seed_repeats_them(server: Running) -> None:
    settings: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "seed": 7, "n": 3}
    first, again = (complete_chat(server, "Hello", **settings) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    chunks = streamed(server, "Hello", **settings)
    assert [text_of(chunks, choice) for choice in range(3)] == texts


def test_a_completion_goes_on_from_text_or_from_token_ids(server: Running) -> None:
    client = server.client()
    ids = server.decoder.encoder.encode_plain("Once upon")
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    from_text = client.completions.create(prompt="Once upon", **settings)
    from_ids = client.completions.create(prompt=ids, **settings)
    two_prompts = client.completions.create(prompt=["Once upon", "Hello"], n=2, **settings)
    stream = client.completions.create(prompt="Once upon", stream=True, **settings)
    assert from_text.choices[0].text == from_ids.choices[0].text == two_prompts.choices[1].text
    assert [choice.index for choice in two_prompts.choices] == [0, 1, 2, 3]
    assert "".join(chunk.choices[0].text for chunk in stream) == from_text.choices[0].text
    assert from_text.usage is not None
    assert from_text.usage.prompt_tokens == len(ids)


def test_a_conversation_is_read_as_openais_clients_write_it(server: Running) -> None:
    """Parts are lines, `developer` is `system`, and an assistant's turn may be empty."""

    def reply(system: str, silence: str | None, words: Any, **assistant_fields: Any) -> str:
        messages = [
            {"role": system, "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": silence, **assistant_fields},
            {"role": "user", "content": words},
        ]
        return text(server, messages=messages, max_completion_tokens=8)

    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    first = reply("developer", None, parts, tool_calls=[], refusal=None)
    assert first == reply("system", "", "Hel\nlo")


@pytest.fixture(scope="module")
def apple(decoder: LocalDecoder) -> Iterator[Running]:
    """Serve the answer "One: an apple Done.", of which a thread writes "an apple"."""
    with running(with_engine(decoder, saying(decoder))) as server:
        yield server


def test_live_events_tell_what_each_thread_does(apple: Running) -> None:
    chunks = streamed(apple, "Hello", stream_options={"pasta_events": True})
    assert text_of(chunks) == "One: an apple Done."
    pieces = [piece for chunk in chunks for piece in chunk.choices]
    events = [event for piece in pieces for event in piece.model_extra.get("pasta_events", [])]
    assert [event["type"] for event in events if event["type"] != "delta"] == [
        *("opened", "closed", "synced", "finished")
    ]
    opened = next(event for event in events if event["type"] == "opened")
    assert (opened["thread"], opened["topic"]) == (1, "fruit")
    texts = {MAIN: "", 1: ""}
    for event in events:
        texts[event.get("thread", MAIN)] += event.get("text", "")
    assert texts == {MAIN: "One:  Done.", 1: "an apple"}
    steps = [event["step"] for event in events]
    assert steps == sorted(steps)


def test_a_stop_string_cuts_the_text_in_reading_order(apple: Running) -> None:
    plain = complete_chat(apple, "Hello", stop=["le D"], logprobs=True)
    chunks = streamed(apple, "Hello", stop=["le D"], stream_options={"include_usage": True})
    [choice] = plain.choices
    assert choice.message.content == text_of(chunks) == "One: an app"
    assert choice.finish_reason == "stop"
    assert cost(chunks[-1]) == cost(plain)
    tokens = "".join(token.token for token in choice.logprobs.content)
    assert tokens.startswith("One: an app"), "a token that a stop cuts is told whole"


def test_logprobs_are_those_of_the_text_in_reading_order(apple: Running) -> None:
    settings: Any = {"logprobs": True, "top_logprobs": 3, "max_tokens": 60}
    [choice] = apple.ask(CHAT, GOOD | settings).json["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == "One: an apple Done."
    for token in tokens:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] <= 0
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert len(token["top_logprobs"]) == 3
    chunks = streamed(apple, "Hello", **settings)
    pieces = [piece for chunk in chunks for piece in chunk.choices if piece.logprobs]
    streamed_tokens = [token.token for piece in pieces for token in piece.logprobs.content or []]
    assert streamed_tokens == [token["token"] for token in tokens]


def test_completions_tell_logprobs_with_their_places(server: Running) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    [choice] = server.ask("/v1/completions", body).json["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    ends = [sum(map(len, logprobs["tokens"][:n])) for n in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == ends
    assert all(len(alternatives) in (2, 3) for alternatives in logprobs["top_logprobs"])
    bare = server.ask("/v1/completions", body | {"logprobs": 0}).json["choices"][0]["logprobs"]
    top_tokens = [list(alternatives) for alternatives in bare["top_logprobs"]]
    assert top_tokens == [[token] for token in bare["tokens"]]
