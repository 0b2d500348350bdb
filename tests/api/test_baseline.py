"""Which sequential rival a checkpoint is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.api.baseline import baseline_of
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.errors import PastaError

MINE = EngineConfig("runs/mine", Path("org/model"), threads=1)
WHOLE = EngineConfig(model=Path("mine.gguf"))
TRAINED = "trained on most of the same responses with the tags taken out"
BASE = "the base model as it is, which was not trained on these responses"
BANNED = "the same weights with promises banned"


@pytest.mark.parametrize(
    ("config", "named", "expected", "name", "about"),
    [
        (EngineConfig(), None, EngineConfig("sequential"), "sequential", TRAINED),
        (EngineConfig("balanced"), None, EngineConfig("sequential"), "sequential", TRAINED),
        (EngineConfig("runs/mine"), None, EngineConfig("none"), "smollm2-135m", BASE),
        (MINE, None, EngineConfig("none", Path("org/model"), threads=1), "model", BASE),
        (
            *(MINE, "runs/plain", EngineConfig("runs/plain", Path("org/model"), threads=1)),
            *("plain", "runs/plain, promises banned"),
        ),
        (MINE, "runs/mine", MINE, "mine", BANNED),
        (
            *(MINE, "plain.gguf", EngineConfig("plain.gguf", threads=1)),
            *("plain.gguf", "plain.gguf, promises banned"),
        ),
        (WHOLE, "mine.gguf", EngineConfig("mine.gguf"), "mine.gguf", BANNED),
    ],
)
def test_a_checkpoint_is_compared_with_what_is_named_or_ships_else_with_its_base_model(
    config: EngineConfig, named: str | None, expected: EngineConfig, name: str, about: str
) -> None:
    found = baseline_of(config, named)
    assert found == (expected, about)
    assert found[0].short_name == name


@pytest.mark.parametrize("config", [WHOLE, EngineConfig(engine="remote")])
def test_where_nothing_tells_a_baseline_one_is_asked_for(config: EngineConfig) -> None:
    with pytest.raises(PastaError, match=r"no baseline is known for .* --baseline"):
        baseline_of(config, None)
