"""What clients get: the official client, streamed and whole, equal to what the decoder writes."""

from __future__ import annotations

import openai
import pytest

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import ordered
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from tests.server.running import HELLO, MODEL, Running

PROMPTS = ["Hello", "What is 2 + 2?", "Name three birds.", "<async>tags</async>", "é 🎈 ü"]
TOKENS = 48


def decoded(server: Running, prompt: str, **rules: object) -> Answer:
    settings = Rules(**{"max_tokens": TOKENS} | rules)  # type: ignore[arg-type]
    return server.decoder.answer(server.decoder.request(prompt, settings, Sampling()))


def whole(client: openai.OpenAI, prompt: str, **settings: object) -> str:
    got = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], temperature=0, **settings
    )
    text = got.choices[0].message.content
    assert text is not None
    return text


def streamed(client: openai.OpenAI, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_stream_plain_reply_and_decoder_agree_to_the_byte(prompt: str, server: Running) -> None:
    client = server.client()
    found = streamed(client, prompt), whole(client, prompt)
    server.wait_until_idle()
    answer = decoded(server, prompt)
    assert found == (answer.text, answer.text)
    assert "".join(ordered(answer.events)) == answer.text
