"""What files of prompts ask, and how often runs do it; worked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.asked import Asked, BehindSync, read_asked
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.checking import NotChecked, check_runs, sound_rows
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import MethodRun
from tests.runfolders import CHUNKED, failed, parallel, record

SHORT = {"kind": "words", "arguments": {"at_most": 8}}


def asking(path: Path, *lines: dict[str, Any]) -> list[Asked]:
    asked = [
        {"id": f"p{n}", "instruction": f"What about {n}?", **one} for n, one in enumerate(lines)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))
    return read_asked(path)


def run_of(label: str, *records: Record) -> MethodRun:
    by_id = {one.id: one for one in records}
    return MethodRun(Path(label), {"method": label, "max_tokens": 400}, by_id, {}, {}, {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "asked.jsonl"


def test_an_answer_passes_if_it_passes_all_of_its_checks(file: Path) -> None:
    both = [SHORT, {"kind": "begins", "arguments": {"string": "Two"}}]
    asked = asking(file, {"checks": [SHORT]}, {"checks": both}, {"checks": both}, {"plain": True})
    base = run_of("sequential", *(record(n) for n in range(4)))
    ours = run_of("pasta", record(0), record(1), parallel(2, text="Two"), parallel(3))
    found = check_runs([base, ours], base, asked)
    passed = found.shares["pasta"]["passed"]
    assert passed.prompts == 3
    assert passed.share.value == pytest.approx(2 / 3)
    assert passed.difference is not None
    assert passed.difference.value == pytest.approx(1 / 3)
    assert found.shares["sequential"]["passed"].difference is None
    assert found.shares["pasta"]["promised"].share.value == 1
    assert {kind: one.share.value for kind, one in found.kinds["pasta"].items()} == {
        "begins": 0.5, "words": 1.0,
    }  # fmt: skip


def test_syncs_are_counted_where_they_belong_and_where_they_do_not(file: Path) -> None:
    needing = {"needs_sync": True, "must_use": ["diet", "sleep"], "at_least": 2}
    asked = asking(file, *[needing] * 4, {"needs_sync": False}, {"needs_sync": False})
    used = CHUNKED.replace("So do both", "Diet first, then sleep")
    half = CHUNKED.replace("So do both", "A diet it is")
    ours = run_of(
        "pasta", parallel(0, annotated=used), parallel(1, annotated=half), parallel(2), record(3),
        parallel(4), record(5),
    )  # fmt: skip
    base = run_of("sequential", *(record(n) for n in range(6)))
    found = check_runs([ours], base, asked).shares["pasta"]
    assert {name: one.share.value for name, one in found.items()} == {
        "synced": 0.75, "used": 0.5, "right": 0.25, "idle_synced": 0.5,
    }  # fmt: skip


def test_failed_requests_pass_nothing_and_are_named_as_are_missing_ones(file: Path) -> None:
    asked = asking(file, {"checks": [SHORT]}, {"checks": [SHORT]}, {"checks": [SHORT]})
    base = run_of("sequential", record(0), record(1))
    found = check_runs([run_of("pasta", record(0), failed(1))], base, asked)
    assert found.shares["pasta"]["passed"].share.value == 0.5
    assert found.not_checked == [
        NotChecked("pasta", "p1", "failed: no answer"),
        NotChecked("pasta", "p2", "has no answer yet, and does not count"),
    ]
    json.dumps(asdict(found))


def test_runs_of_other_prompts_are_refused(file: Path) -> None:
    asked = asking(file, {"checks": [SHORT]})
    with pytest.raises(PastaError, match="answers none of the 1 prompts"):
        check_runs([], run_of("sequential", record(7)), asked)


@pytest.mark.parametrize(
    ("behind", "text", "holds"),
    [
        (BehindSync(("bike", "bus")), "Take the Bikes.", True),
        (BehindSync(("bike", "bus")), "A motorbike, an omnibus.", False),
        (BehindSync(("total",), number=True), "A total of 5.", True),
        (BehindSync(("total",), number=True), "A total of five.", False),
        (BehindSync(number=True), "5", True),
    ],
)
def test_a_right_answer_uses_beginnings_of_words_and_numbers(
    behind: BehindSync, text: str, holds: bool
) -> None:
    assert behind.holds(text) == holds


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "asks nothing that could be checked"),
        ({"checks": SHORT}, "asked.jsonl:1: 'checks' is no list"),
        ({"checks": ["words"]}, "asked.jsonl:1: not a check: 'words'"),
        ({"checks": [{"kind": "wrods"}]}, "asked.jsonl:1: no check is called 'wrods'"),
        ({"checks": [{"kind": "upper", "arguments": []}]}, "arguments of 'upper' are no JSON obj"),
        ({"plain": "yes"}, "asked.jsonl:1: 'plain' is no bool: 'yes'"),
        ({"needs_sync": True, "at_least": True}, "'at_least' is no int: True"),
        ({"needs_sync": True, "must_use": [3]}, "'must_use' holds something that is no text"),
        ({"instruction": " ", "plain": True}, "asked.jsonl:1: 'instruction' is empty"),
    ],
)
def test_a_line_that_cannot_be_verified_is_refused_with_its_place(
    file: Path, line: dict[str, Any], message: str
) -> None:
    with pytest.raises(PastaError, match=message):
        asking(file, line)


def test_sound_answers_ended_pass_all_checks_and_neither_loop_nor_leave_items_empty(
    file: Path,
) -> None:
    long = {"kind": "words", "arguments": {"at_least": 9}}
    asked = asking(
        file, *[{"checks": [SHORT]}] * 7, {"checks": [long]}, {"plain": True}, {"checks": [SHORT]}
    )
    loop = "a b c d a b c d"
    runs = [
        run_of(
            "ours",
            record(0),
            record(1, hit_limit=True),
            record(2, text="1. 1. 1.", annotated="1. 1. 1."),
            record(3, text=loop, annotated=loop),
            record(4, text="", annotated=""),
            failed(5),
            record(7),
            parallel(8),
            record(9, truncated_chunks=1),
        )
    ]
    (row,) = sound_rows(runs, asked)
    assert (row.id, row.source, row.instruction, row.response) == (
        "ours-p0", "ours", "What about 0?", "This about 0.",
    )  # fmt: skip


def test_of_a_prompts_sound_answers_those_with_most_tokens_a_step_are_kept(file: Path) -> None:
    asked = asking(file, {"checks": [SHORT]}, {"checks": [SHORT]})
    slow = run_of("first", record(0, text="One", annotated="One", plain_tokens=20), record(1))
    fast = run_of("second", record(0, text="Two", annotated="Two", plain_tokens=90), record(1))
    rows = sound_rows([slow, fast], asked, per_prompt=1)
    assert [(row.id, row.response) for row in rows] == [
        ("second-p0", "Two"), ("first-p1", record(1).annotated),
    ]  # fmt: skip
    assert len(sound_rows([slow, fast], asked)) == 3, "a text counts once"
