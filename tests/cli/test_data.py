"""`pasta data`: from any rows to a training set, and what it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta

pytestmark = pytest.mark.usefixtures("tiny_cache")

RESPONSES = {
    "a": 'Two: <promise topic="tea" tokens="20"/><async>Tea is hot.</async>',
    "b": "Milk is white, and most people like it.",
    "c": "   ",
    "e": "Write \\<sync/> to wait.",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"id": i, "instruction": f"About {i}?", "response": r} for i, r in RESPONSES.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_chosen_written_and_described(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "train.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text('{"instruction": "about B"}\n')
    build = ("data", "build", source, "-o", out, "--exclude", prompts)
    found = pasta(*build, "--json").object
    assert (found["read"], found["rows"], found["literal_tags"]) == (4, 2, 1)
    assert found["dropped"] == {"empty": 1, "in an evaluation set": 1}
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["id"]: row["response"] for row in kept} == {i: RESPONSES[i] for i in "ae"}
    assert pasta("data", "report", out, "--json").object["chunks"] == 1
    said = pasta(*build).err
    assert "kept, with tags that are text, escaped: 1" in said
    assert "left out:      1 empty" in said


def test_what_cannot_be_built_is_told_in_a_line_and_not_written(
    pasta: Pasta, source: Path, tmp_path: Path
) -> None:
    again, out = tmp_path / "again.jsonl", tmp_path / "train.jsonl"
    again.write_bytes(source.read_bytes())
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    refused = {
        (source, "--min-tokens", 99): "no row of 4 is left: {",
        (source, again): f"{again}:1: id 'a' was used before",
        (broken,): f"{broken}:1: not JSON: ",
    }
    for arguments, message in refused.items():
        found = pasta("data", "build", *arguments, "-o", out)
        assert (found.status, out.exists()) == (2, False)
        assert f"pasta: {message}" in found.err
