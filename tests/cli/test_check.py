"""`pasta eval check`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta
from tests.runfolders import failed, parallel, record, write_run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    check = {"kind": "words", "arguments": {"at_most": 5}}
    lines = [{"instruction": f"What about {n}?", "checks": [check]} for n in range(4)]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "sequential", "sequential", [record(n) for n in range(4)])
    write_run(folder / "pasta", "pasta", [record(0), record(1), parallel(2), failed(3)])
    return folder


def test_a_table_of_shares_and_the_failed_by_name(pasta: Pasta, runs: Path, prompts: Path) -> None:
    found = pasta("eval", "check", runs, "--prompts", prompts)
    assert found.status == 0
    head, ours, *_ = found.out.splitlines()
    assert head.split()[:3] == ["run", "figure", "prompts"]
    assert ours.split()[:4] == ["pasta", "passed", "4", "50.0"]
    assert "-50.0 [-100.0, 0.0]" in ours
    assert found.err == "pasta: the prompt 4 failed: no answer\n"


def test_json_holds_the_same(pasta: Pasta, runs: Path, prompts: Path) -> None:
    found = pasta("eval", "check", runs, "--prompts", prompts, "--json").object
    assert found["baseline"] == "sequential"
    assert found["shares"]["pasta"]["passed"]["share"]["value"] == 0.5
    assert found["kinds"]["sequential"]["words"]["difference"] is None
    assert found["not_checked"] == [{"run": "pasta", "prompt": "4", "reason": "failed: no answer"}]


def test_another_baseline_can_be_named(pasta: Pasta, runs: Path, prompts: Path) -> None:
    found = pasta(
        "eval", "check", runs, "--prompts", prompts, "--baseline", runs / "pasta", "--json"
    ).object
    assert found["shares"]["sequential"]["passed"]["difference"]["value"] == 0.5


def test_an_unknown_check_is_refused_with_its_line(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"instruction": "What?", "checks": [{"kind": "word"}]}\n')
    assert pasta("eval", "check", runs, "--prompts", path).complaint == (
        2, f"pasta: {path}:1: no check is called 'word'", "Is it 'words'?",
    )  # fmt: skip


def test_sound_answers_are_kept_as_training_rows(
    pasta: Pasta, runs: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "kept.jsonl"
    found = pasta("eval", "check", runs / "sequential", "--prompts", prompts, "--keep", out)
    assert f"{out}: kept 4 of 4 answers" in found.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[2]["instruction"] == "What about 2?"
    assert rows[2]["response"] == "This about 2."


def test_answers_to_prompts_that_ask_for_nothing_can_be_kept_but_not_checked(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    asked, out = tmp_path / "open.jsonl", tmp_path / "kept.jsonl"
    asked.write_text('{"instruction": "What about 0?"}\n{"instruction": "What about 1?"}\n')
    command = ("eval", "check", runs / "sequential", "--prompts", asked)
    assert f"{asked} asks nothing that could be checked" in pasta(*command).err
    assert f"{out}: kept 2 of 2 answers" in pasta(*command, "--keep", out).err


def test_where_no_answer_is_sound_no_file_is_written(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    asked, out = tmp_path / "loud.jsonl", tmp_path / "kept.jsonl"
    loud = {"instruction": "What about 0?", "checks": [{"kind": "upper"}]}
    asked.write_text(json.dumps(loud) + "\n")
    found = pasta("eval", "check", runs / "sequential", "--prompts", asked, "--keep", out)
    assert found.status == 2
    assert f"no answer is sound; {out} was not written" in found.err
    assert not out.exists()


def test_per_prompt_without_keep_is_refused(pasta: Pasta, runs: Path, prompts: Path) -> None:
    found = pasta("eval", "check", runs, "--prompts", prompts, "--per-prompt", "1")
    assert found.complaint == (
        2, "pasta: --per-prompt is about what --keep writes", "Give --keep FILE, too.",
    )  # fmt: skip
