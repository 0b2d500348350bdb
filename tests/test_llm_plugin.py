"""The plugin for `llm`: its models answer as the front door does."""

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
Models = tuple[Any, pasta.Model]


@pytest.fixture(scope="module")
def models(tiny_checkpoint: TinyCheckpoint) -> Iterator[Models]:
    """Give the plugin's model over the tiny checkpoint, and that itself."""
    from pasta_decoding import llm_plugin

    with (
        pasta.load(tiny_checkpoint.adapter, model=tiny_checkpoint.base, engine="torch") as tiny,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(llm_plugin, "_loaded", lambda _adapter: tiny)
        yield llm_plugin.PastaModel("tiny"), tiny


def test_the_model_streams_what_the_front_door_answers(models: Models) -> None:
    plugin, tiny = models
    expected = tiny.answer(QUESTION, max_tokens=60)
    response = plugin.prompt(QUESTION, max_tokens=60)
    pieces = list(response)
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1
    usage = response.usage()
    assert (usage.input, usage.output) == (
        expected.usage.prompt_tokens,
        expected.usage.plain_tokens,
    )
    assert plugin.prompt(QUESTION, stream=False, max_tokens=60).text() == expected.text


@pytest.mark.parametrize("reloaded", [False, True])
def test_a_conversation_and_a_system_prompt_are_handed_on(reloaded: bool, models: Models) -> None:
    """`llm -c` goes on in another process, which has loaded messages and no responses."""
    plugin, tiny = models
    talk = plugin.conversation()
    first = talk.prompt("Hello.", system="Be brief.", max_tokens=20).text()
    if reloaded:
        messages = [*talk.responses[0].prompt.messages, *talk.responses[0].messages()]
        talk = plugin.conversation()
        talk.loaded_messages = messages
    second = talk.prompt("And now?", max_tokens=20).text()
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert second == tiny.answer(turns, max_tokens=20).text


def test_options_are_those_of_the_front_door_and_reach_it(models: Models) -> None:
    """All of them but `logit_bias`, whose ids nobody types; and no default of its own."""
    plugin, tiny = models
    options = plugin.Options.model_fields
    assert set(options) == {setting.name for setting in fields(GenerationConfig)} - {"logit_bias"}
    assert plugin.Options().model_dump(exclude_none=True) == {}
    assert all(field.description for field in options.values())
    settings: dict[str, Any] = {"max_tokens": 30, "temperature": 1.2, "seed": 3, "eagerness": -9}
    settings |= {"presence_penalty": 1.5, "max_threads": 2, "max_seconds": 1000.0}
    assert plugin.prompt(QUESTION, **settings).text() == tiny.answer(QUESTION, **settings).text
    with pytest.raises(llm.ModelError, match="max_tokens is 0, not a whole number of at least 1"):
        plugin.prompt(QUESTION, max_tokens=0).text()
    with pytest.raises(ValidationError):
        plugin.Options(max_threads="many")
