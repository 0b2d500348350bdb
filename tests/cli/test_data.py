"""`pasta data` and `lint`: from rows to a training set, what it is made of, what is wrong in it."""

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome, Pasta

RESPONSES = {
    "a": 'Two: <promise topic="tea" tokens="20"/><async>Tea is hot.</async>',
    "b": "Milk is white, and most people like it.",
    "c": "   ",
    "e": "Write \\<sync/> to wait.",
}


@pytest.fixture
def source(tmp_path: Path, tiny_cache: Path) -> Path:
    assert tiny_cache.is_dir()
    path = tmp_path / "rows.jsonl"
    rows = [{"id": i, "instruction": f"About {i}?", "response": r} for i, r in RESPONSES.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_chosen_written_and_described(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"instruction": "about B"}\n')
    build = ("data", "build", source, "-o", out, "--exclude", prompts)
    figures = pasta(*build, "--json").object
    assert (figures["read"], figures["rows"]) == (4, 2)
    assert figures["dropped"] == {"empty": 1, "in an evaluation set": 1}
    selected = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["id"]: row["response"] for row in selected} == {i: RESPONSES[i] for i in "ae"}
    assert pasta("data", "report", out, "--json").object["chunks"] == 1
    assert "left out:      1 empty" in pasta(*build).err


def test_what_cannot_be_built_is_told_in_a_line_and_not_written(
    pasta: Pasta, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train.jsonl"
    outcome = pasta("data", "build", source, "--max-total-tokens", 1, "-o", out)
    assert (outcome.status, out.exists(), "pasta: no row of 4 is l" in outcome.err) == (
        2,
        False,
        True,
    )


# lint

GOOD = 'One: <promise topic="a" tokens="20"/><async>b</async>\n'
BAD = "One\n<async>b</async> <sync/>\n"


def test_it_names_file_line_column_and_rule(tmp_path: Path, pasta: Pasta) -> None:
    good = tmp_path / "good.txt"
    bad = tmp_path / "bad.txt"
    good.write_text('<promise tokens="20"/><async>b</async>')
    assert pasta("lint", good).status == 1
    assert pasta("lint", good, "--no-topic").status == 0
    good.write_text(GOOD)
    bad.write_text(BAD)
    assert pasta("lint", good, good) == Outcome(0, "", "")
    outcome = pasta("lint", good, bad)
    assert outcome.status == 1
    assert outcome.out == (
        f"{bad}:2:1: async-without-promise: <async> keeps no promise\n"
        f"{bad}:2:9: stray-close: </async> closes nothing\n"
        f"{bad}:2:18: idle-sync: <sync/> with no chunk to wait for\n"
    )


def test_a_warning_alone_is_no_failure(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "marked.txt"
    path.write_text(GOOD.replace("<async>b", "<async>**b**: c"))
    warning = "warning: markup-in-chunk: markup opens the chunk; it belongs to the main thread"
    assert pasta("lint", path) == Outcome(0, f"{path}:1:45: {warning}\n", "")
    path.write_text(f"{path.read_text()}<sync/><sync/>")
    assert pasta("lint", path).status == 1


def test_it_reads_rows_and_names_the_line_and_the_column_in_the_response(
    tmp_path: Path, pasta: Pasta
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    turns = [{"role": "user", "content": "i"}, {"role": "assistant", "content": BAD}]
    lines = [
        json.dumps({"id": "1", "instruction": "i", "response": GOOD}),
        "{",
        json.dumps({"messages": turns}),
        '{"id": "4"}',
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    outcome = pasta("lint", path)
    assert (outcome.status, outcome.err) == (1, "")
    assert outcome.out == (
        f"{path}:2: not JSON: Expecting property name enclosed in double quotes (column 2)\n"
        f"{path}:3:5: async-without-promise: <async> keeps no promise\n"
        f"{path}:3:13: stray-close: </async> closes nothing\n"
        f"{path}:3:22: idle-sync: <sync/> with no chunk to wait for\n"
        f"{path}:4: no 'instruction'\n"
    )


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, pasta: Pasta) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for name, message in (
        ("missing.txt", ": No such file or directory"),
        ("latin.txt", " is not UTF-8: "),
        ("", ": Is a directory"),
    ):
        outcome = pasta("lint", tmp_path / name)
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err.startswith(f"pasta: {tmp_path / name}{message}")
