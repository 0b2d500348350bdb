"""What is left out, and what is kept of a wish with the run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.train import settled
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.server.settings import Settings
from tests.checkpoint import TinyCheckpoint


def test_the_defaults_of_a_config_are_those_of_the_decoder() -> None:
    config = GenerationConfig()
    assert (config.rules, config.sampling()) == (Rules(), SamplingParams())
    assert Settings().answer_tokens == config.max_tokens


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


def test_the_settings_need_no_torch() -> None:
    code = "import sys, pasta_decoding.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
