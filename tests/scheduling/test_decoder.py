"""Which checkpoints an engine can decode as they were trained."""

from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.scheduling.decoder import LocalDecoder, decoder_over
from tests.engines.subjects import speaking
from tests.scripted import ScriptedEngine, shuffled
from tests.tiny import VOCABULARY, tiny_llama


class Strict(ScriptedEngine):
    """An engine that takes each position only behind the one before."""

    free_positions = False


def loaded_for(**changes: Any) -> LoadedModel:
    loaded = speaking(tiny_llama())
    return replace(loaded, checkpoint=replace(loaded.checkpoint, **changes))


def decoder(
    kind: type[ScriptedEngine], joining: Joining | None = None, **record: Any
) -> LocalDecoder:
    return decoder_over(kind(shuffled(VOCABULARY), VOCABULARY), loaded_for(**record), joining)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_with_gaps_needs_an_engine_with_free_positions_or_the_text_join(name: str) -> None:
    assert decoder(ScriptedEngine, scheme=name).scheme.name == name
    assert decoder(Strict, scheme=name, joins=("text",)).scheme.name == "shared-max"
    if SCHEMES[name].consecutive:
        assert decoder(Strict, scheme=name).scheme.name == name
        return
    with pytest.raises(PastaError, match=f"'scripted' cannot take .* the scheme {name!r}"):
        decoder(Strict, scheme=name)


def test_a_checkpoint_is_joined_as_it_was_trained_unless_somebody_insists() -> None:
    with pytest.raises(PastaError, match="for the joins prose, not 'kv' or 'text'") as caught:
        decoder(ScriptedEngine, joins=("prose",))
    assert caught.value.hint == (
        "Use another adapter, or --join text to decode with this one all the same."
    )
    decoders = [
        decoder(ScriptedEngine, joining, joins=joins)
        for joins, joining in ((("text", "kv"), None), (("text",), None), (("text",), Joining.kv))
    ]
    first, second, third = decoders
    assert first.joining is third.joining is Joining.kv
    assert second.joining is Joining.text
    assert first.warnings == second.warnings == ()
    assert third.warnings == ("the checkpoint was not trained for the join kv: expect worse text",)
