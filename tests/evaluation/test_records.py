"""Records: how they are made from an answer, and how they go to disk and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.lines import encode_line
from pasta_decoding.data.rows import question_of
from pasta_decoding.engines.scripted import follow
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.generate import ask_all
from pasta_decoding.evaluation.methods import Pasta
from pasta_decoding.evaluation.records import (
    Record,
    failed,
    from_line,
    promises_of,
    read_records,
)
from tests.evaluation.puppet import puppet
from tests.runtime.machine import LINES, FakeClock, finish, greedy, machine
from tests.runtime.play import SIZE

WHOLE = Record(
    "1f",
    "Why?",
    "koala",
    text="a b",
    annotated="a b",
    promises=((20, 3), (40, 41)),
    repeats=(0.5, 0.25),
    seconds=0.5,
    first_token_s=0.1,
    turns="3f",
)


def test_promises_of_a_worked_example() -> None:
    """Main: OPEN b P20, ' a', SYNC, c. The chunk: ASYNC in the step of P20, then c, a."""
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE), clock=FakeClock())
    [answer] = finish(scheduler, [scheduler.add(greedy())])
    assert promises_of(answer) == ((20, 2),)


def test_an_answer_that_talks_about_a_sync_has_none() -> None:
    decoder = puppet(lambda _question: "Write <sync/> to wait.")
    method = Pasta(decoder, GenerationConfig(max_tokens=100))
    [record] = ask_all(method, [question_of("How?")])
    assert record.annotated == "Write \\<sync/> to wait."
    assert record.syncs == 0


def test_a_record_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    failure = failed(question_of("How?"), "too long")
    path.write_text(encode_line(asdict(WHOLE)) + encode_line(asdict(failure)) + '{"id": "cut')
    assert read_records(path) == [WHOLE, failure]
    assert failure.error == "too long"
    assert failure.tokens_per_step == 1.0


def test_there_are_no_records_without_a_file(tmp_path: Path) -> None:
    assert read_records(tmp_path / "nowhere.jsonl") == []


@pytest.mark.parametrize("change", [{"pace": 1}, {"promises": [3]}, {"repeats": 1}])
def test_a_line_of_something_else_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(encode_line(asdict(WHOLE)) + encode_line(asdict(WHOLE) | change))
    with pytest.raises(PastaError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:2: not a record of an evaluation: ")


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(encode_line(asdict(WHOLE)) + "{\n")
    with pytest.raises(PastaError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:2: not a record of an evaluation: ")


def test_a_line_needs_an_id() -> None:
    with pytest.raises(TypeError):
        from_line({"instruction": "Why?"})
