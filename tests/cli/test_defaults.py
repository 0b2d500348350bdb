"""What is left out, and what is kept of a wish with the run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pasta_decoding.api.options import AnswerSettings, rules_of, sampling_of
from pasta_decoding.api.settings import Dtype, EngineName, LoadSettings
from pasta_decoding.cli.preference import settled
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from pasta_decoding.server.settings import Settings
from tests.checkpoint import TinyCheckpoint


def test_an_option_left_out_is_one_that_the_decoder_does_without() -> None:
    left_out = AnswerSettings().options()
    assert sampling_of(left_out) == Sampling()
    assert rules_of(left_out) == Rules()
    assert rules_of({}) == rules_of(left_out)
    assert Settings().answer_tokens == Rules().max_tokens


def test_a_run_keeps_the_number_format_that_it_has_not_the_wish(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pasta_decoding.models.loading.default_device", lambda: "cpu")
    wish = LoadSettings(model=tiny_checkpoint.base, engine=EngineName.torch, dtype=Dtype.auto)
    for native in ("bfloat16", "float32"):
        monkeypatch.setattr(
            "pasta_decoding.models.loading.native_dtype", lambda _device, found=native: found
        )
        loading, name = settled(wish, tiny_checkpoint.adapter)
        assert name == f"torch {native}"
        assert loading == replace(wish, dtype=Dtype(native))


def test_the_settings_need_no_torch() -> None:
    code = "import sys, pasta_decoding.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
