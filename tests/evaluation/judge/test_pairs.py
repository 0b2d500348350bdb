"""Reading judged pairs: one file of pairs, or AlpacaEval's folder of many models."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.judge.base import JudgedPair
from pasta_decoding.evaluation.judge.pairs import read_alpaca_eval, read_pairs
from tests.judging import made_up, write_pairs

ROW = {"prompt": "p", "response_a": "x", "response_b": "y", "label": "a"}


@pytest.mark.parametrize("name", ["people.jsonl", "people.jsonl.gz"])
def test_pairs_come_back_as_they_were_written_under_the_files_name(
    name: str, tmp_path: Path
) -> None:
    pairs = [*made_up(3, source="people"), JudgedPair("people", "p", "x", "y", 0.5)]
    assert read_pairs(write_pairs(tmp_path / name, pairs)) == pairs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"label": "c"}, "the label is 'c'"),
        (ROW | {"label": 1}, "the label is 1"),
        (ROW | {"label": ["a"]}, "the label is ['a']"),
        ({key: ROW[key] for key in ROW if key != "label"}, "no 'label'"),
        ({"prompt": "p", "response_a": "x", "label": "a"}, "no text 'response_b'"),
        (ROW | {"prompt": None}, "no text 'prompt'"),
    ],
)
def test_a_row_that_is_no_pair_is_named(
    row: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(PastaError) as found:
        read_pairs(path)
    assert str(found.value) == f"{path}:3: {message}"
    assert found.value.hint


def test_a_pair_that_nobody_has_judged_yet_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    path.write_text(json.dumps(ROW | {"label": None}) + "\n" + json.dumps(ROW) + "\n")
    assert read_pairs(path) == [JudgedPair("people", "p", "x", "y", 1.0)]


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


ANNOTATIONS = """instruction_id,model,reference,preference
0,even,ref,2
1,even,ref,1
0,also,ref,1
1,also,ref,2
0,weak,ref,1
1,weak,ref,1.2
1,gone,ref,2
9,even,ref,2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts, a reference, two models that win half of the time and one that does not."""
    prompts: list[dict[str, object]] = [
        {"instruction_id": key, "instruction": f"p{key}"} for key in (0, 1)
    ]
    write_lines(tmp_path / "prompts_dev.jsonl.gz", prompts)
    for kind, writer, names in (
        ("references", "reference", ["ref"]),
        ("outputs_all", "model", ["even", "also", "weak"]),
    ):
        rows: list[dict[str, object]] = [
            {"instruction_id": key, writer: name, "output": f"{name}{key}"}
            for name in names
            for key in (0, 1)
        ]
        write_lines(tmp_path / f"{kind}_dev.jsonl.gz", rows)
    (tmp_path / "annotations.csv").write_text(ANNOTATIONS)
    return tmp_path


def test_models_meet_the_reference_and_those_that_win_as_often_meet_each_other(
    folder: Path,
) -> None:
    against = [
        JudgedPair("annotations/even", "p0", "even0", "ref0", 1.0),
        JudgedPair("annotations/even", "p1", "even1", "ref1", 0.0),
        JudgedPair("annotations/even", "p0", "also0", "ref0", 0.0),
        JudgedPair("annotations/even", "p1", "also1", "ref1", 1.0),
        JudgedPair("annotations/uneven", "p0", "weak0", "ref0", 0.0),
        JudgedPair("annotations/uneven", "p1", "weak1", "ref1", 1.2 - 1),
    ]
    between = [
        JudgedPair("annotations-between", "p0", "even0", "also0", 1.0),
        JudgedPair("annotations-between", "p1", "even1", "also1", 0.0),
    ]
    assert read_alpaca_eval(folder) == against + between


def test_verdicts_are_kept_apart_by_their_annotator(folder: Path) -> None:
    path = folder / "annotations_more.csv"
    path.write_text(
        "instruction_id,model,reference,preference,annotator\n0,weak,ref,1.5,somebody\n"
    )
    assert read_alpaca_eval(folder)[-1] == JudgedPair("somebody/even", "p0", "weak0", "ref0", 0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,weak,ref,3", "the preference 3 is not in [1, 2]"),
        ("0,weak,ref,nan", "the preference nan is not in [1, 2]"),
        ("0,weak,ref,often", "not an annotation"),
        ("x,weak,ref,1", "not an annotation"),
        ("0,weak", "not an annotation"),
    ],
)
def test_a_line_that_is_no_annotation_is_named(line: str, message: str, folder: Path) -> None:
    path = folder / "annotations.csv"
    path.write_text(f"instruction_id,model,reference,preference\n{line}\n")
    with pytest.raises(PastaError, match="annotations") as found:
        read_alpaca_eval(folder)
    assert str(found.value) == f"{path}:2: {message}"


def test_what_is_missing_in_a_folder_is_named(folder: Path) -> None:
    (folder / "references_dev.jsonl.gz").unlink()
    with pytest.raises(PastaError, match=r"no references\*\.jsonl"):
        read_alpaca_eval(folder)


def test_a_folder_whose_verdicts_have_no_answers_is_refused(folder: Path) -> None:
    write_lines(folder / "prompts_dev.jsonl.gz", [{"instruction_id": 7, "instruction": "p"}])
    with pytest.raises(PastaError, match="no verdict with both of its answers"):
        read_alpaca_eval(folder)


def test_a_row_of_a_folder_without_its_keys_is_named(folder: Path) -> None:
    write_lines(folder / "outputs_all_dev.jsonl.gz", [{"instruction_id": 0, "output": "x"}])
    with pytest.raises(PastaError, match=r"gz:1: a row needs instruction_id, model, output"):
        read_alpaca_eval(folder)
