"""Commands on files: exit status and exact output, also when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta, interrupted

COMMANDS = [
    "",
    "run",
    "compare",
    "lint",
    "pull",
    "annotate",
    "train",
    "train sft",
    "bench",
    "bench answers",
]
GOOD = 'One: <promise topic="a" tokens="20"/><async>b</async>\n'
BAD = "One\n<async>b</async> <sync/>\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, pasta: Pasta) -> None:
    found = pasta(*command.split(), "--help")
    assert found.status == 0
    assert f"Usage: pasta {command}".rstrip() in found.out


@pytest.mark.parametrize(
    "arguments", [["fly"], ["run"], ["lint", "--fast", "x"], ["run", "x", "--seed", "-1"]]
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


def test_lint_can_do_without_topics(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "no_topic.txt"
    path.write_text('<promise tokens="20"/><async>b</async>')
    assert pasta("lint", path).status == 1
    assert pasta("lint", path, "--no-topic").status == 0


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
    assert (found.status, found.out) == (0, f"{tiny_cache / 'smollm2-135m-instruct'}\n")


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
    assert message.startswith(f"pasta: could not put the embedded model into {cache}: ")
    assert hint == ("it needs 0.8 GB in a folder that you may write; PASTA_CACHE names another one")


def row(number: int, response: str) -> str:
    found = {"id": str(number), "source": "s", "instruction": "i", "response": response, "x": 1}
    return json.dumps(found)


LIST = "Tips:\n\n" + "\n".join(
    f"{n}. **{name}**: {' '.join([name.lower()] * 25)}."
    for n, name in enumerate(("Sleep", "Water", "Walks"), start=1)
)
LINES = [row(1, LIST), "{", row(1, "twice"), '{"id": "4"}', "\x80", row(5, "Plain.")]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(LINES).encode("latin-1"))
    return path


@pytest.mark.usefixtures("tiny_cache")
def test_annotate_stops_at_the_first_broken_line_and_writes_nothing(
    broken: Path, pasta: Pasta
) -> None:
    out = broken.with_name("out.jsonl")
    out.write_text("before")
    found = pasta("annotate", broken, out)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {broken}:2: not JSON: ")
    assert out.read_text() == "before"


@pytest.mark.usefixtures("tiny_cache")
def test_annotate_keeps_going_when_asked_and_names_every_line_it_skipped(
    broken: Path, pasta: Pasta
) -> None:
    out = broken.with_name("out.jsonl")
    found = pasta("annotate", broken, out, "--with", "structure", "--keep-going")
    assert found.status == 1
    said = [line for line in found.err.splitlines() if line]
    assert said[0].startswith(f"skipped {broken}:2: not JSON: ")
    assert said[1:] == [
        f"skipped {broken}:3: id '1' was used before",
        f"skipped {broken}:4: no 'instruction'",
        f"skipped {broken}:5: not UTF-8 (byte 1)",
        f"2 rows in {out}, 1 with a promise, 4 skipped",
    ]
    first, last = map(json.loads, out.read_text().splitlines())
    assert "<promise topic=" in first["response"]
    assert first["x"] == 1
    assert last["response"] == "Plain."


@pytest.mark.usefixtures("tiny_cache")
def test_an_interrupted_annotate_leaves_no_file(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row(1, LIST))
    monkeypatch.setattr(Path, "replace", interrupted)
    found = pasta("annotate", path, tmp_path / "out.jsonl")
    assert found.status == 130
    assert found.err.endswith("pasta: interrupted\n")
    assert list(tmp_path.iterdir()) == [path]


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


@pytest.mark.usefixtures("tiny_cache")
def test_annotate_names_an_output_that_it_cannot_write(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row(1, LIST))
    out = tmp_path / "nowhere" / "out.jsonl"
    found = pasta("annotate", path, out)
    assert found.status == 2
    assert f"pasta: cannot write {out}: No such file or directory\n" in found.err


def test_annotate_without_the_embedded_model_says_to_pull_it(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text(row(1, LIST))
    expected = (2, f"pasta: the embedded model is not in {tmp_path}", "run `pasta pull`")
    assert pasta("annotate", path, tmp_path / "out.jsonl").complaint == expected
