"""What is kept of a wish with a training run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.train import settled
from tests.checkpoint import TinyCheckpoint


def test_a_run_keeps_the_number_format_that_it_has_not_the_wish(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pasta_decoding.models.load.default_device", lambda: "cpu")
    wish = EngineConfig(model=tiny_checkpoint.base, engine="torch", dtype="auto")
    for native in ("bfloat16", "float32"):
        monkeypatch.setattr(
            "pasta_decoding.models.load.native_dtype", lambda _device, found=native: found
        )
        loading, name = settled(wish, tiny_checkpoint.adapter)
        assert name == f"torch {native}"
        assert loading == replace(wish, dtype=(native))
