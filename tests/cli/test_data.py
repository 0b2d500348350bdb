"""`pasta data`: from any rows to a training set, and what it is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pasta_decoding.errors import install_command
from pasta_decoding.lang.tree import Span, show
from tests.cli.conftest import Pasta

pytestmark = pytest.mark.usefixtures("tiny_cache")

RESPONSES = {
    "a": 'Two: <promise topic="tea" tokens="20"/><async>Tea is hot.</async>',
    "b": "Milk is white, and most people like it.",
    "c": "   ",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"id": i, "instruction": f"About {i}?", "response": r} for i, r in RESPONSES.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_chosen_written_and_described(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    found = pasta("data", "build", source, "-o", out, "--language", "en", "--json").object
    assert (found["read"], found["rows"], found["dropped"]) == (3, 2, {"empty": 1})
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["id"]: row["response"] for row in kept} == {i: RESPONSES[i] for i in "ab"}
    assert pasta("data", "report", out, "--json").object["chunks"] == 1


def test_a_table_says_what_was_left_out(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    outcome = pasta("data", "build", source, "-o", tmp_path / "train.jsonl", "--min-chunks", 1)
    assert "left out:      1 empty" in outcome.err
    assert "left out:      1 few chunks" in outcome.err


def test_rows_annotated_twice_are_left_out_and_texts_about_tags_are_counted(
    pasta: Pasta, source: Path, tmp_path: Path
) -> None:
    twice = show((Span(RESPONSES["a"]),))
    lines = [
        {"id": "d", "instruction": "About d?", "response": twice},
        {"id": "e", "instruction": "About e?", "response": "Write \\<sync/> to wait."},
        {"id": "f", "instruction": "About f?", "response": "Write <sync/> to wait."},
    ]
    source.write_text(source.read_text() + "\n".join(map(json.dumps, lines)))
    out = tmp_path / "train.jsonl"
    build = ("data", "build", source, "-o", out)
    found = pasta(*build, "--json").object
    assert found["dropped"] == {"empty": 1, "annotated twice": 1, "malformed": 1}
    assert (found["rows"], found["literal_tags"]) == (3, 1)
    said = pasta(*build).err
    assert "left out:      1 annotated twice" in said
    assert "kept, with tags that are text, escaped: 1" in said


def test_evaluation_prompts_are_left_out(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"instruction": "about A"}\n')
    out = tmp_path / "train.jsonl"
    found = pasta("data", "build", source, "-o", out, "--exclude", prompts, "--json").object
    assert found["dropped"] == {"in an evaluation set": 1, "empty": 1}


def test_a_set_without_a_row_is_not_written(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    status, message, hint = pasta("data", "build", source, "-o", out, "--min-tokens", 99).complaint
    assert status == 2
    assert message.endswith("pasta: no row of 3 is left: {'length': 2, 'empty': 1}")
    assert hint == "Loosen the filter that dropped most; nothing was written."
    assert not out.exists()


def test_an_id_may_be_used_once_in_all_files(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_bytes(source.read_bytes())
    outcome = pasta("data", "build", source, again, "-o", tmp_path / "train.jsonl")
    assert outcome.complaint == (
        2,
        f"pasta: id 'a' is in {source} and in {again}",
        "Give every row its own id, or leave one of the files out.",
    )


def test_a_row_without_an_id_in_two_files_is_a_duplicate(pasta: Pasta, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for path in (first, second):
        path.write_text('{"prompt": "How?", "completion": "So."}\n')
    build = ("data", "build", first, second, "-o", tmp_path / "train.jsonl", "--json")
    assert pasta(*build).object["dropped"] == {"duplicate": 1}
    for path in (first, second):
        path.write_text(path.read_text() * 2)
    assert pasta(*build).object["dropped"] == {"duplicate": 3}


def test_broken_lines_are_named_and_the_rest_kept(
    pasta: Pasta, source: Path, tmp_path: Path
) -> None:
    source.write_text(source.read_text() + "{\n")
    build = ("data", "build", source, "-o", tmp_path / "train.jsonl")
    assert pasta(*build).status == 2
    outcome = pasta(*build, "--keep-going", "--json")
    assert (outcome.status, outcome.object["rows"]) == (0, 2)
    assert f"skipped {source}:4: not JSON" in outcome.err


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "pasta: --question is not a pattern: "), ("a", "pasta: --question has 0 groups")],
)
def test_a_pattern_that_is_none_is_refused(
    pasta: Pasta, source: Path, tmp_path: Path, pattern: str, message: str
) -> None:
    outcome = pasta("data", "build", source, "-o", tmp_path / "t.jsonl", "--question", pattern)
    assert outcome.status == 2
    assert outcome.err.startswith(message)


def test_a_missing_language_detector_is_told(
    pasta: Pasta, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    outcome = pasta("data", "build", source, "-o", tmp_path / "t.jsonl", "--language", "en")
    assert outcome.complaint == (
        2,
        "pasta: --language needs py3langid",
        f"Install it: {install_command('data')}",
    )
