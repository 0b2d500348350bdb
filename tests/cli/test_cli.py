"""Commands on files: exit status and exact output, also when something is wrong."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pasta_decoding import __version__
from pasta_decoding.cli.app import app
from tests.cli.conftest import Outcome, Pasta, interrupted

COMMANDS = [
    "",
    "run",
    "compare",
    "lint",
    "pull",
    "annotate",
    "train",
    "train sft",
    "serve",
    "eval",
    "eval generate",
    "eval rate",
    "eval report",
    "cache",
    "cache list",
    "cache clean",
]
ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "examples" / "annotated.jsonl", ROOT / "data" / "annotated_clean.jsonl.gz"]
GOOD = 'One: <promise topic="a" tokens="20"/><async>b</async>\n'
BAD = "One\n<async>b</async> <sync/>\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, pasta: Pasta) -> None:
    found = pasta(*command.split(), "--help")
    assert found.status == 0
    assert f"Usage: pasta {command}".rstrip() in found.out


@pytest.mark.parametrize(
    "arguments", [["fly"], ["run"], ["lint", "--fast", "x"], ["run", "x", "--seed", "y"]]
)
def test_a_wrong_command_line_is_status_2_and_shows_the_usage(
    arguments: list[str], pasta: Pasta
) -> None:
    found = pasta(*arguments)
    assert found.status == 2
    assert "Usage: pasta" in found.err
    assert "Error: " in found.err
    assert found.out == ""


def test_without_a_command_the_help_is_shown(pasta: Pasta) -> None:
    found = pasta()
    assert found.status == 2
    assert "compare" in found.out + found.err


def test_lint_is_silent_about_good_files(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "good.txt"
    path.write_text(GOOD)
    found = pasta("lint", path, path)
    assert (found.status, found.out, found.err) == (0, "", "")


def test_lint_names_file_line_column_and_rule(tmp_path: Path, pasta: Pasta) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text(GOOD)
    bad.write_text(BAD)
    found = pasta("lint", good, bad)
    assert found.status == 1
    assert found.out == (
        f"{bad}:2:1: async-without-promise: <async> keeps no promise\n"
        f"{bad}:2:9: stray-close: </async> closes nothing\n"
        f"{bad}:2:18: idle-sync: <sync/> with no chunk to wait for\n"
    )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_lint_reads_rows_and_names_the_line_and_the_column_in_the_response(
    name: str, tmp_path: Path, pasta: Pasta
) -> None:
    path = tmp_path / name
    lines = [
        json.dumps({"id": "1", "instruction": "i", "response": GOOD}),
        "{",
        json.dumps({"messages": [{"role": "user", "content": "i"}, said(BAD)]}),
        '{"id": "4"}',
    ]
    contents = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(contents) if path.suffix == ".gz" else contents)
    found = pasta("lint", path)
    assert (found.status, found.err) == (1, "")
    assert found.out == (
        f"{path}:2: not JSON: Expecting property name enclosed in double quotes (column 2)\n"
        f"{path}:3:5: async-without-promise: <async> keeps no promise\n"
        f"{path}:3:13: stray-close: </async> closes nothing\n"
        f"{path}:3:22: idle-sync: <sync/> with no chunk to wait for\n"
        f"{path}:4: no 'instruction'\n"
    )


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("path", SHIPPED)
def test_lint_finds_nothing_in_the_files_that_ship(path: Path, pasta: Pasta) -> None:
    assert pasta("lint", path) == Outcome(0, "", "")


def test_lint_names_a_file_of_rows_that_cannot_be_unpacked(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"plain")
    found = pasta("lint", path)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith(f"pasta: cannot read {path}: Not a gzipped file")


def test_lint_can_do_without_topics(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "no_topic.txt"
    path.write_text('<promise tokens="20"/><async>b</async>')
    assert pasta("lint", path).status == 1
    assert pasta("lint", path, "--no-topic").status == 0
    assert "--no-no-topic" not in pasta("lint", "--help").out


def test_lint_cannot_run_on_a_file_that_is_missing_or_not_text(
    tmp_path: Path, pasta: Pasta
) -> None:
    missing = tmp_path / "missing.txt"
    expected = (2, f"pasta: {missing}: No such file or directory", "Give a readable file.")
    assert pasta("lint", missing).complaint == expected
    expected = (2, f"pasta: {tmp_path}: Is a directory", "Give a readable file.")
    assert pasta("lint", tmp_path).complaint == expected
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    expected = (2, f"pasta: {latin}: byte 3 is not UTF-8", "Save the file as UTF-8.")
    assert pasta("lint", latin).complaint == expected


def test_pull_keeps_a_sound_model_and_prints_its_folder(tiny_cache: Path, pasta: Pasta) -> None:
    found = pasta("pull")
    assert (found.status, found.out) == (0, f"{tiny_cache / 'smollm2-135m'}\n")


def test_pull_offline_says_so_and_leaves_nothing_behind(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    status, message, hint = pasta("pull", "--source", "hub").complaint
    assert status == 2
    assert "pasta: could not download HuggingFaceTB/SmolLM2-135M-Instruct: " in message
    assert hint == ("check that this machine reaches the hub, or use `pasta pull` without --source")
    assert list((tmp_path / "cache").iterdir()) == []


def test_pull_into_a_cache_that_cannot_be_written_names_the_way_out(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    monkeypatch.setenv("PASTA_CACHE", str(cache))
    status, message, hint = pasta("pull").complaint
    assert status == 2
    assert message.startswith(f"pasta: could not put the default model into {cache}: ")
    assert hint == ("it needs 0.8 GB in a folder that you may write; PASTA_CACHE names another one")


def test_an_interrupted_lint_says_so(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", interrupted)
    found = pasta("lint", tmp_path / "any.txt")
    assert (found.status, found.out, found.err) == (130, "", "\npasta: interrupted\n")


def test_an_interrupted_pull_leaves_nothing_in_the_cache(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", interrupted)
    assert pasta("pull", "--source", "hub").status == 130
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("processes", "torn_down"), [("1", True), ("2", False)])
def test_one_of_several_processes_leaves_without_taking_the_interpreter_down(
    processes: str, torn_down: bool, tmp_path: Path
) -> None:
    """Threads of the others' connections could abort it. What it printed is not lost."""
    (tmp_path / "a.txt").write_text(BAD, encoding="utf-8")
    at_exit = "import atexit, runpy; atexit.register(print, 'torn down');"
    found = subprocess.run(
        [sys.executable, "-c", f"{at_exit} runpy.run_module('pasta_decoding')", "lint", "a.txt"],
        cwd=tmp_path,
        env=os.environ | {"WORLD_SIZE": processes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert found.stdout.startswith("a.txt:2:")
    assert found.stdout.endswith("torn down\n") is torn_down


@pytest.mark.parametrize("statement", ["import pasta_decoding", "import pasta_decoding.cli.app"])
def test_what_answers_load_is_not_loaded_before(statement: str) -> None:
    slow = "{'torch', 'transformers', 'peft', 'matplotlib', 'numpy', 'gguf', 'tokenizers'}"
    script = f"import sys; {statement}; print(sorted({slow} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("module", "shown"), [("peft.tuners.lora", False), ("transformers", False), ("mine", True)]
)
def test_what_libraries_will_change_is_no_news_for_a_user(
    module: str, shown: bool, pasta: Pasta
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pasta("--version")
        warnings.warn_explicit("a name goes away", FutureWarning, "file.py", 1, module)
    assert bool(told) is shown


def test_the_version_is_told(pasta: Pasta) -> None:
    assert pasta("--version").out == f"pasta {__version__}\n"


def commands_of(command: Any, name: str = "pasta") -> Iterator[tuple[str, Any]]:
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands_of(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


def test_no_flag_denies_a_denial() -> None:
    options = [
        text
        for _, command in commands_of(get_command(app))
        for option in command.params
        for text in (*option.opts, *option.secondary_opts)
    ]
    assert len(options) > 100
    assert [text for text in options if text.startswith("--no-no")] == []


def test_every_option_is_explained_by_a_sentence() -> None:
    unexplained = [
        (name, option.opts[0])
        for name, command in commands_of(get_command(app))
        if not name.startswith("pasta train")
        for option in command.params
        for text in [getattr(option, "help", None) or ""]
        if not text.endswith((".", ")")) or len(text.split()) < 3 or text.startswith("Of ")
    ]
    assert unexplained == []
