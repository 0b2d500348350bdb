"""What is meant where nothing is named, and what is refused beside a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import find_adapter
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.server.settings import Settings


def test_the_defaults_of_a_config_are_those_of_the_decoder() -> None:
    config = GenerationConfig()
    assert (config.rules, config.sampling()) == (Rules(), SamplingParams())
    assert Settings().answer_tokens == config.max_tokens


@pytest.mark.parametrize(
    ("settings", "name", "join"),
    [
        (EngineConfig(), "balanced", "kv"),
        (EngineConfig(engine="remote"), "balanced", "text"),
        (EngineConfig(adapter="sequential"), "sequential", "kv"),
    ],
)
def test_servers_get_an_adapter_that_knows_their_join(
    settings: EngineConfig, name: str, join: str
) -> None:
    assert settings.adapter_name == name
    assert join in checkpoints.load(find_adapter(name)).joins


def test_a_whole_model_is_named_once_as_either() -> None:
    file = Path("mine.gguf")
    assert EngineConfig(model=file).whole == EngineConfig(adapter=str(file)).whole == file
    assert EngineConfig(model=Path("org/base"), adapter="balanced").whole is None
    assert EngineConfig("balanced", file).whole is None, "then it is the adapter's base"
    with pytest.raises(PastaError, match=r"mine\.gguf is a whole model, adapter included"):
        _ = EngineConfig(str(file), Path("org/base")).whole


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (GenerationConfig, "max_tokens", [0, None, "5", 2.5, True]),
        (GenerationConfig, "max_threads", [0, True]),
        (GenerationConfig, "max_seconds", [-1.0, "3", float("nan")]),
        (GenerationConfig, "temperature", [-0.1, 101, None, float("nan")]),
        (GenerationConfig, "top_p", [0, 1.5]),
        (GenerationConfig, "top_k", [0, 2.5]),
        (GenerationConfig, "min_p", [1.5, -0.1]),
        (GenerationConfig, "repetition_penalty", [0, 2.1]),
        (GenerationConfig, "presence_penalty", [3, "1"]),
        (GenerationConfig, "frequency_penalty", [float("nan")]),
        (GenerationConfig, "logit_bias", [{3: 200}, {"a": 1}, {3: "x"}, [3]]),
        (GenerationConfig, "seed", [-1, None, 0.5]),
        (GenerationConfig, "stop", ["", ["a", ""], [1], 3]),
        (GenerationConfig, "parallel", ["yes", 1, None]),
        (GenerationConfig, "eagerness", [1000, "much", float("nan")]),
        (EngineConfig, "dtype", ["F17", None]),
        (EngineConfig, "join", ["kw"]),
        (EngineConfig, "max_model_len", [0, "8k"]),
        (EngineConfig, "cache_tokens", [-1, None]),
        (EngineConfig, "threads", [0]),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_the_name_of_its_field(
    kind: Any, field: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(PastaError) as caught:
            kind(**{field: value})
        assert caught.value.field == field


def test_values_of_other_forms_mean_the_same() -> None:
    assert GenerationConfig(logit_bias={"65": 1.0}, stop="a") == GenerationConfig(
        logit_bias={65: 1.0}, stop=["a"]
    )
    nothing: dict[str, Any] = {"stop": None, "logit_bias": None, "top_k": None, "max_seconds": None}
    assert GenerationConfig().updated(**nothing) == GenerationConfig()
    named = EngineConfig.named(model="org/base", base_url="http://localhost/v1", join="kv")
    assert named == EngineConfig(
        model=Path("org/base"), base_url=("http://localhost/v1",), join=Joining.kv
    )
