"""The recipes: the script for one model on a tiny one, and the paper's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pasta_decoding.data.lines import read_lines
from pasta_decoding.training.config import PreferenceConfig, SftConfig, read_config
from tests.checkpoint import make_base
from tests.golden.golden import talkative

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_recipe_goes_from_a_base_to_a_report(tmp_path: Path) -> None:
    base, out = talkative(make_base(tmp_path / "base")), tmp_path / "out"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"SMOKE": "1", "DEVICE": "cpu", "MODEL": str(base), "OUT": str(out), "PATH": path}
    environment = {**os.environ, **settings, "PASTA_CACHE": str(tmp_path / "cache")}
    recipe = ["sh", str(ROOT / "recipes" / "qwen2.5-coder-1.5b.sh")]
    subprocess.run(recipe, env=environment, check=True)
    report = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))
    assert (report["baseline"], len(report["runs"])) == ("sequential-sequential", 5)
    sources = {row["source"] for row in read_lines(out / "rows.jsonl")}
    assert {"", "written/sync"} <= sources, "own and written rows"
    for name in ("fast", "balanced", "quality"):
        settings = json.loads((out / name / "config.json").read_text(encoding="utf-8"))
        assert (settings["rounds"], settings["samples"]) == (2, 4)


def test_the_papers_setting_is_one_file_for_both_stages() -> None:
    paper = ROOT / "recipes" / "paper.yaml"
    first = SftConfig(**read_config(paper, SftConfig))
    second = PreferenceConfig(**read_config(paper, PreferenceConfig))
    assert (first.scheme, first.lora_rank, second.samples, second.rounds) == ("reserve", 0, 10, 2)
