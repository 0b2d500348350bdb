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


def test_the_best_of_what_is_no_run_is_refused_and_nothing_written(
    pasta: Pasta, tmp_path: Path
) -> None:
    found = pasta("data", "best", tmp_path, "-o", tmp_path / "best.jsonl")
    assert found.status == 2
    assert f"{tmp_path} holds no scored answers of round 1" in found.err
    assert not (tmp_path / "best.jsonl").exists()


def test_instructions_ask_for_what_responses_do(pasta: Pasta, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "asked.jsonl"
    found = pasta("data", "hindsight", source, "-o", out, "--seed", "3")
    assert found.out == "2 rows, made of 3, ask for what they do\n"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["response"] for row in rows] == [RESPONSES[i] for i in "ab"]
    assert all(row["checks"] and len(row["instruction"]) > len("About a?") for row in rows)


def test_a_folder_is_no_file_to_write(pasta: Pasta, source: Path) -> None:
    found = pasta("data", "hindsight", source, "-o", "./")
    assert (found.status, found.out) == (2, "")
    assert "cannot write .: Is a directory" in found.err


def test_nothing_to_ask_for_writes_nothing(pasta: Pasta, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"instruction": "?", "response": " "}\n')
    found = pasta("data", "hindsight", empty, "-o", tmp_path / "asked.jsonl")
    assert found.status == 2
    assert "nothing can be asked of the 1 responses" in found.err
    assert not (tmp_path / "asked.jsonl").exists()


def test_lists_come_twice_with_either_kind_of_markers(pasta: Pasta, tmp_path: Path) -> None:
    source, out = tmp_path / "lists.jsonl", tmp_path / "twins.jsonl"
    rows = [
        {"instruction": "Two drinks?", "response": "- Tea\n- Milk"},
        {"instruction": "Drink?", "response": "Tea."},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = pasta("data", "hindsight", source, "--twins", "-o", out)
    assert found.out == "2 rows, made of 2, ask for what they do\n"
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["response"] for row in written] == ["- Tea\n- Milk", "1. Tea\n2. Milk"]
    assert [row["checks"][0]["kind"] for row in written] == ["bullets", "numbered"]


def test_answers_come_at_several_lengths(pasta: Pasta, tmp_path: Path) -> None:
    source, out = tmp_path / "long.jsonl", tmp_path / "lengths.jsonl"
    chunk = '<promise topic="{0}" tokens="90"/><async>Some {0}. Much {0}. All {0} there.</async>'
    rows = [
        {
            "id": "a",
            "instruction": "?",
            "response": f"{chunk.format('tea')}\n{chunk.format('milk')}",
        },
        {"id": "b", "instruction": "?", "response": f"{chunk.format('tea')}<sync/> So tea."},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = pasta("data", "lengths", source, "-o", out)
    assert found.out == "3 rows, of 1 of 2 answers\n"
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in written] == ["a", "a-2", "a-1"]
    assert written[2]["response"] == (
        '<promise topic="tea" tokens="10"/><async>Some tea.</async>\n'
        '<promise topic="milk" tokens="10"/><async>Some milk.</async>'
    )


def test_answers_that_cannot_be_cut_write_nothing(
    pasta: Pasta, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "lengths.jsonl"
    found = pasta("data", "lengths", source, "-o", out)
    assert found.status == 2
    assert "none of the 3 answers has chunks to cut" in found.err
    assert not out.exists()
