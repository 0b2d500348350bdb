"""Which sequential rival a checkpoint is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.api.baseline import baseline_of, checkpoint_name
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.errors import PastaError


@pytest.mark.parametrize("adapter", [None, "balanced", "sequential"])
def test_adapters_that_ship_are_compared_with_the_trained_baseline(adapter: str | None) -> None:
    found = baseline_of(EngineConfig(adapter=adapter, threads=1), None)
    assert found.config == EngineConfig(adapter="sequential", threads=1)
    assert (found.name, found.about) == (
        "sequential",
        "trained on the same responses with the tags taken out",
    )


@pytest.mark.parametrize("model", [None, Path("org/model")])
def test_others_are_compared_with_their_base_model(model: Path | None) -> None:
    found = baseline_of(EngineConfig(adapter="runs/mine", model=model), None)
    assert found.config == EngineConfig(adapter="none", model=model)
    assert found.name == ("the default model" if model is None else "model")


def test_what_is_named_is_taken_with_the_same_base() -> None:
    own = EngineConfig(adapter="runs/mine", model=Path("org/model"))
    found = baseline_of(own, "runs/plain")
    assert found.config == EngineConfig(adapter="runs/plain", model=Path("org/model"))
    assert (found.name, found.about) == ("plain", "runs/plain, with promises banned")
    assert baseline_of(own, "runs/mine").about == "the same weights with promises banned"


def test_a_whole_model_brings_no_base_of_others() -> None:
    own = EngineConfig(adapter="runs/mine", model=Path("org/model"))
    assert baseline_of(own, "plain.gguf").config == EngineConfig(adapter="plain.gguf")
    whole = EngineConfig(model=Path("mine.gguf"))
    assert baseline_of(whole, "plain.gguf").config == EngineConfig(adapter="plain.gguf")
    assert baseline_of(whole, "mine.gguf").about == "the same weights with promises banned"
    assert checkpoint_name(whole) == "mine.gguf"


@pytest.mark.parametrize(
    "config", [EngineConfig(model=Path("mine.gguf")), EngineConfig(engine="remote")]
)
def test_where_nothing_tells_a_baseline_one_is_asked_for(config: EngineConfig) -> None:
    with pytest.raises(PastaError, match="nothing tells what") as caught:
        baseline_of(config, None)
    assert "--baseline" in caught.value.hint
