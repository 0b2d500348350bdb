"""What is meant where nothing is named, and what is refused beside a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.api.settings import EngineName, FileType, LoadSettings
from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.loading import find_adapter


@pytest.mark.parametrize(
    ("settings", "name", "join"),
    [
        (LoadSettings(), "balanced", "kv"),
        (LoadSettings(engine=EngineName.remote), "balanced", "text"),
        (LoadSettings(adapter="sequential"), "sequential", "kv"),
    ],
)
def test_servers_get_an_adapter_that_knows_their_join(
    settings: LoadSettings, name: str, join: str
) -> None:
    assert settings.adapter_name == name
    assert join in checkpoints.load(find_adapter(name)).joins


def test_the_format_that_keeps_the_answers_is_the_default() -> None:
    assert LoadSettings().quant is FileType.F16


def test_a_whole_model_is_named_once_as_either() -> None:
    file = Path("mine.gguf")
    assert LoadSettings(model=file).whole == LoadSettings(adapter=str(file)).whole == file
    assert LoadSettings(model=Path("org/base"), adapter="balanced").whole is None
    for beside in (LoadSettings("balanced", file), LoadSettings(str(file), Path("org/base"))):
        with pytest.raises(PastaError, match=r"mine\.gguf is a whole model, adapter and all"):
            _ = beside.whole
