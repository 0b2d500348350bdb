"""The recipes: the script for one model on a tiny one, and the paper's settings."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from pasta_decoding.cli import main
from pasta_decoding.data.lines import read_lines
from pasta_decoding.training.config import PreferenceConfig, SftConfig, read_settings_file
from tests.checkpoint import make_base
from tests.golden.golden import talkative

ROOT = Path(__file__).parents[2]
# What the recipe calls `pasta`: this process does the work, which imports torch once.
PASTA = """#!/bin/sh
printf '%s\\n' "$@" > "$PIPES/commands"
read -r status < "$PIPES/status"
exit "$status"
"""


@pytest.mark.slow
def test_the_recipe_goes_from_a_base_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = talkative(make_base(tmp_path / "base"))
    out = tmp_path / "out"
    (tmp_path / "pasta").write_text(PASTA)
    (tmp_path / "pasta").chmod(0o755)
    commands = tmp_path / "commands"
    status = tmp_path / "status"
    os.mkfifo(commands)
    os.mkfifo(status)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    settings = {"SMOKE": "1", "DEVICE": "cpu", "MODEL": str(base), "OUT": str(out), "PATH": path}
    recipe = ["sh", "-c", 'sh "$0"; echo "ended $?" > "$PIPES/commands"']
    with subprocess.Popen(
        [*recipe, str(ROOT / "recipes" / "qwen2.5-coder-1.5b.sh")],
        env=os.environ | settings | {"PIPES": str(tmp_path)},
        start_new_session=True,
    ) as process:
        try:
            while not (words := commands.read_text().splitlines())[0].startswith("ended"):
                status.write_text(f"{main(words)}\n")
        finally:  # where a command raised, it waits for its status
            os.killpg(process.pid, signal.SIGKILL)
    assert words == ["ended 0"]
    report = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))
    assert (report["baseline"], len(report["runs"])) == ("sequential-sequential", 5)
    sources = {row["source"] for row in read_lines(out / "rows.jsonl")}
    assert {"", "written/sync"} <= sources, "own and written rows"
    for name in ("fast", "balanced", "quality"):
        settings = json.loads((out / name / "config.json").read_text(encoding="utf-8"))
        assert (settings["rounds"], settings["samples"]) == (2, 4)


def test_the_papers_setting_is_one_file_for_both_stages() -> None:
    paper = ROOT / "recipes" / "paper.yaml"
    first = SftConfig(**read_settings_file(paper, SftConfig))
    second = PreferenceConfig(**read_settings_file(paper, PreferenceConfig))
    assert (first.scheme, first.lora_rank, second.samples, second.rounds) == ("reserve", 0, 10, 2)
