"""Prompt files: what is read, and what is refused with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pasta_decoding.data.questions import Question, question_of, read_questions
from pasta_decoding.errors import PastaError


def written(path: Path, contents: str | bytes) -> Path:
    raw = contents if isinstance(contents, bytes) else contents.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


ROWS: list[dict[str, object]] = [
    {"instruction": "Why?", "dataset": "koala", "instruction_id": 7},
    {"instruction": "How?"},
]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
QUESTIONS = [question_of("Why?", "koala"), question_of("How?")]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_a_line_is_a_prompt(name: str, tmp_path: Path) -> None:
    assert read_questions(written(tmp_path / name, LINES)) == QUESTIONS


@pytest.mark.parametrize("name", ["alpaca_eval.json", "alpaca_eval.json.gz"])
def test_a_json_list_is_read_too_as_alpaca_eval_has_it(name: str, tmp_path: Path) -> None:
    text = "\n " + json.dumps([row | {"output": "", "generator": "x"} for row in ROWS], indent=1)
    assert read_questions(written(tmp_path / name, text)) == QUESTIONS


def test_an_id_is_a_digest_of_the_instruction_alone() -> None:
    assert question_of("How?") == Question("0ea5977074d19b32", "How?", None)
    assert question_of("How?", "koala").id == question_of("How?").id


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('{"instruction": "a"}\n{"prompt": "b"}', ":2: 'instruction' is missing"),
        ('{"instruction": 7}', ":1: 'instruction' is not a string"),
        ('\n{"instruction": " \\n"}', ":2: 'instruction' is empty"),
        ('{"instruction": "a", "dataset": 3}', ":1: 'dataset' is not a string"),
        (
            '{"instruction": "a", "instruction_id": [3]}',
            ":1: 'instruction_id' is neither a string nor a whole number",
        ),
        ('{"instruction": "\\ud800"}', ":1: 'instruction' holds half a surrogate pair"),
        ('{"instruction": "a"}\n{', ":2: not JSON: "),
        ('{"instruction": "a"}\n"b"', ":2: not a JSON object"),
        (b'{"instruction": "a"}\n{"instruction": "\xff"}', ":2: not UTF-8 (byte 18)"),
        ("", " holds no prompt"),
        ("[]", " holds no prompt"),
        ('[\n{"instruction": "a"},\n{"instruction" "b"}]', ":3: not JSON: "),
        ('[{"instruction": "a"}, 3]', ", entry 2: not a JSON object"),
        ('[{"instruction": "a"}, {"output": "b"}]', ", entry 2: 'instruction' is missing"),
        (b'[\n{"instruction": "\xff"}]', ":2: not UTF-8"),
        ("[" * 100_000, ": not JSON that can be read"),
    ],
)
def test_what_is_broken_is_refused_with_its_place(
    contents: str | bytes, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "prompts", contents)
    with pytest.raises(PastaError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_prompt_or_an_id_that_is_there_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts", LINES + '{"instruction": "How?", "dataset": "other"}')
    with pytest.raises(PastaError) as caught:
        read_questions(path)
    assert str(caught.value) == f"{path}:4: the same 'instruction' as {path}:2"
    written(path, LINES + '{"instruction": "When?", "instruction_id": 7}')
    with pytest.raises(PastaError) as caught:
        read_questions(path)
    assert str(caught.value) == f"{path}:4: the same 'instruction_id' as {path}:1"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match=r"cannot read .*nowhere: No such file"):
        read_questions(tmp_path / "nowhere")
