"""Which checkpoints an engine can decode as they were trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.engines.scripted import ScriptedEngine, shuffled
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.models.load import Loaded
from pasta_decoding.runtime.local import decoder_over
from tests.engines.subjects import speaking
from tests.tiny import VOCABULARY, tiny_llama


class Strict(ScriptedEngine):
    """An engine that takes each position only behind the one before."""

    free_positions = False


def loaded_for(**changes: Any) -> Loaded:
    loaded = speaking(tiny_llama())
    return replace(loaded, checkpoint=replace(loaded.checkpoint, **changes))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_with_gaps_needs_an_engine_with_free_positions(name: str) -> None:
    free, strict = (kind(shuffled(VOCABULARY), VOCABULARY) for kind in (ScriptedEngine, Strict))
    assert decoder_over(free, loaded_for(scheme=name)).scheme.name == name
    if SCHEMES[name].consecutive:
        assert decoder_over(strict, loaded_for(scheme=name)).scheme.name == name
        return
    with pytest.raises(PastaError) as caught:
        decoder_over(strict, loaded_for(scheme=name))
    assert str(caught.value) == (
        f"the engine 'scripted' cannot take the positions of the scheme {name!r}"
    )


def test_a_checkpoint_for_other_joins_is_refused() -> None:
    engine = ScriptedEngine(shuffled(VOCABULARY), VOCABULARY)
    with pytest.raises(PastaError) as caught:
        decoder_over(engine, loaded_for(joins=("prose",)))
    assert str(caught.value) == (
        "the checkpoint was trained for the joins prose, not 'kv' or 'text'"
    )
    assert caught.value.hint == (
        "Use another adapter, or --join text to decode with this one all the same."
    )


def test_a_checkpoint_is_joined_as_it_was_trained_unless_somebody_insists() -> None:
    engine = ScriptedEngine(shuffled(VOCABULARY), VOCABULARY)
    both, text = loaded_for(joins=("text", "kv")), loaded_for(joins=("text",))
    assert decoder_over(engine, both).joining is Joining.kv
    assert decoder_over(engine, text).joining is Joining.text
    assert decoder_over(engine, text).trained
    foreign = decoder_over(engine, text, Joining.kv)
    assert foreign.joining is Joining.kv
    assert not foreign.trained


@pytest.mark.parametrize("name", SCHEMES)
def test_the_text_join_takes_any_scheme_on_any_engine(name: str) -> None:
    engine = Strict(shuffled(VOCABULARY), VOCABULARY)
    decoder = decoder_over(engine, loaded_for(scheme=name, joins=("text",)))
    assert decoder.scheme.name == "shared-max"
