"""The plugin for `llm`: its models answer as the front door does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

import pasta_decoding as pasta
from pasta_decoding.api.config import GenerationConfig
from tests.checkpoint import TinyCheckpoint

llm = pytest.importorskip("llm")
QUESTION = "What are three good habits?"


@pytest.fixture
def models(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, pasta.Model]]:
    """Give the blocking and the async model over the tiny checkpoint, and that itself."""
    from pasta_decoding import llm_plugin

    with pasta.load(tiny_checkpoint.adapter, model=tiny_checkpoint.base, engine="torch") as tiny:
        monkeypatch.setattr(llm_plugin, "_loaded", lambda _adapter: tiny)
        yield llm_plugin.PastaModel("tiny"), llm_plugin.AsyncPastaModel("tiny"), tiny


def test_each_adapter_that_ships_is_a_model() -> None:
    from pasta_decoding import llm_plugin

    found = []
    llm_plugin.register_models(lambda model, other: found.append((model, other)))
    assert {model.model_id for model, _ in found} >= {"pasta-balanced", "pasta-sequential"}
    assert all(model.model_id == other.model_id for model, other in found)


def test_it_streams_what_the_front_door_answers(models: tuple[Any, Any, pasta.Model]) -> None:
    blocking, _, tiny = models
    expected = tiny.answer(QUESTION, max_tokens=60)
    response = blocking.prompt(QUESTION, max_tokens=60)
    pieces = list(response)
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1
    usage = response.usage()
    assert (usage.input, usage.output) == (
        expected.usage.prompt_tokens,
        expected.usage.plain_tokens,
    )
    assert blocking.prompt(QUESTION, stream=False, max_tokens=60).text() == expected.text


def test_the_async_model_answers_the_same(models: tuple[Any, Any, pasta.Model]) -> None:
    _, waiting, tiny = models

    async def ask() -> str:
        text: str = await waiting.prompt(QUESTION, max_tokens=60).text()
        return text

    assert asyncio.run(ask()) == tiny.answer(QUESTION, max_tokens=60).text


def test_a_conversation_and_a_system_prompt_are_handed_on(
    models: tuple[Any, Any, pasta.Model],
) -> None:
    blocking, _, tiny = models
    talk = blocking.conversation()
    first = talk.prompt("Hello.", system="Be brief.", max_tokens=20).text()
    second = talk.prompt("And now?", max_tokens=20).text()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert second == tiny.answer(messages, max_tokens=20).text


def test_what_llm_kept_of_a_conversation_is_handed_on(
    models: tuple[Any, Any, pasta.Model],
) -> None:
    """`llm -c` goes on in another process, which has messages and no responses."""
    blocking, _, tiny = models
    first = blocking.conversation()
    first.prompt("Hello.", max_tokens=20).text()
    kept = [*first.responses[0].prompt.messages, *first.responses[0].messages()]
    later = blocking.conversation()
    later.loaded_messages = kept
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": first.responses[0].text()},
        {"role": "user", "content": "And now?"},
    ]
    assert (
        later.prompt("And now?", max_tokens=20).text() == tiny.answer(messages, max_tokens=20).text
    )


def test_options_are_those_of_the_front_door(models: tuple[Any, Any, pasta.Model]) -> None:
    blocking, _, tiny = models
    settings: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 1.2,
        "seed": 3,
        "repetition_penalty": 1.3,
    }
    assert blocking.prompt(QUESTION, **settings).text() == tiny.answer(QUESTION, **settings).text
    with pytest.raises(llm.ModelError, match="not a whole number of at least 1"):
        blocking.prompt(QUESTION, max_tokens=0).text()
    with pytest.raises(ValidationError):
        blocking.Options(max_threads="many")


def test_what_may_be_said_of_an_answer_is_what_the_front_door_takes(
    models: tuple[Any, Any, pasta.Model],
) -> None:
    """All of it but `logit_bias`, whose ids nobody types; and no default of its own."""
    blocking, waiting, _ = models
    options = blocking.Options.model_fields
    assert set(options) == {one.name for one in fields(GenerationConfig)} - {"logit_bias"}
    assert blocking.Options().model_dump(exclude_none=True) == {}
    assert all(field.description for field in options.values())
    assert waiting.Options is blocking.Options
