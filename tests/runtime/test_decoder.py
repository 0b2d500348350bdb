"""Which checkpoints an engine can decode as they were trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.engines.scripted import ScriptedEngine, shuffled
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.models.loading import Loaded
from pasta_decoding.runtime.decoder import decoder_over
from tests.engines.subjects import speaking
from tests.tiny import VOCABULARY, tiny_llama


class Strict(ScriptedEngine):
    """An engine that takes each position only behind the one before."""

    @property
    def free_positions(self) -> bool:
        return False


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
    with pytest.raises(PastaError, match="was trained for the joins text, not 'kv'"):
        decoder_over(engine, loaded_for(joins=("text",)))
    assert decoder_over(engine, loaded_for(joins=("text", "kv")))
