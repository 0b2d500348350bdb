"""A command's defaults are those of the settings that it fills: one object, not two numbers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.api.settings import Dtype, EngineName, LoadSettings
from pasta_decoding.cli.data import build
from pasta_decoding.cli.preference import preference, settled
from pasta_decoding.cli.train import sft
from pasta_decoding.data.build import Wanted
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from tests.checkpoint import TinyCheckpoint

SFT = SftConfig(data=(), base_name="")
STAGE_2 = PreferenceConfig(prompts=(), policy="", baseline="")
CALLED = {"max_length": "max_tokens"}


@pytest.mark.parametrize(
    ("command", "settings", "known"),
    [(sft, SFT, 15), (preference, STAGE_2, 17), (build, Wanted(), 15)],
    ids=["train sft", "train preference", "data build"],
)
def test_an_option_left_out_is_a_setting_left_out(
    command: Callable[..., Any], settings: object, known: int
) -> None:
    left_to_start = {"scheme", "topic", "base_name"}  # which take what --start or --model has
    ours = {
        CALLED.get(name, name): one.default
        for name, one in inspect.signature(command).parameters.items()
        if hasattr(settings, CALLED.get(name, name)) and name not in left_to_start
    }
    theirs = {name: getattr(settings, name) for name in ours}
    given = {name for name, one in ours.items() if one is inspect.Parameter.empty}
    others = {"eval_data", "engine"}  # none is an empty list; and what the wish for one leads to
    checked = ours.keys() - given - others
    assert {name: ours[name] for name in checked} == {name: theirs[name] for name in checked}
    assert len(checked) >= known


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
