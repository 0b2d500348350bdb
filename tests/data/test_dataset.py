"""Rows on disk: what is written is read back, broken lines are named, files are whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.dataset import Row, read_prompts, read_rows, write_rows
from pasta_decoding.errors import PastaError
from tests.examples import few

GOOD = '{"id": "a", "source": "s", "instruction": "i", "response": "r"}'
ROWS = [Row("a", "s", "i", "r"), Row("b", "", "é", "<async>", {"verdict": "kept", "ids": [1, 2]})]
TEXT = st.text('ab"\\\n\r\u2028\x00\xe9\U0001f35d<>', max_size=4)
JSON = st.none() | st.booleans() | st.integers() | TEXT | st.lists(st.integers(), max_size=3)
EXTRA = st.dictionaries(TEXT.map("x_".__add__), JSON, max_size=2)


def lines(tmp_path: Path, *found: str | bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in found))
    return path


@few(25)  # each writes files
@given(
    st.lists(
        st.builds(Row, TEXT.filter(bool), TEXT, TEXT, TEXT, EXTRA),
        unique_by=lambda row: row.id,
        max_size=4,
    )
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        path = tmp_path_factory.mktemp("rows") / name
        assert write_rows(path, rows) == len(rows)
        assert list(read_rows(path)) == rows


def test_a_name_that_ends_in_gz_is_compressed_and_the_same_rows_give_the_same_bytes(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz"
    write_rows(first, ROWS)
    write_rows(second, ROWS)
    assert first.read_bytes() == second.read_bytes()
    assert gzip.decompress(first.read_bytes()).count(b"\n") == 2


def test_a_missing_source_is_empty_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = lines(tmp_path, "", '{"id": "a", "instruction": "i", "response": "r"}', "  ", "")
    assert list(read_rows(path)) == [Row("a", "", "i", "r")]


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "i"}]
ANSWER = [{"role": "assistant", "content": "r"}]
FORMS: dict[str, dict[str, object]] = {
    "texts": {"prompt": "i", "completion": "r"},
    "one turn": {"messages": [*ASKED[1:], *ANSWER]},
    "a system message": {"messages": [*ASKED, *ANSWER]},
    "two sides": {"prompt": ASKED, "completion": ANSWER},
    "several turns": {"messages": [*ASKED[1:], *ANSWER, *ASKED[1:], *ANSWER]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_other_projects_are_read_and_written_as_our_own(
    form: str, tmp_path: Path
) -> None:
    path = lines(tmp_path, json.dumps(FORMS[form] | {"score": 3}))
    [row] = read_rows(path)
    assert (row.source, row.instruction, row.response, row.extra) == ("", "i", "r", {"score": 3})
    turns = {"a system message": 2, "two sides": 2, "several turns": 3}.get(form, 1)
    assert [turn.role for turn in row.conversation] == (
        ["user", "assistant", "user"] if turns == 3 else ["system", "user"][-turns:]
    )
    write_rows(path, [row])
    assert json.loads(path.read_text())["instruction"] == "i"
    assert list(read_rows(path)) == [row]


def test_of_two_forms_of_the_same_the_one_that_was_read_is_written(tmp_path: Path) -> None:
    two = lines(tmp_path, json.dumps({"messages": [*ASKED[1:], *ANSWER], "response": "OTHER"}))
    [row] = read_rows(two)
    assert (row.response, row.extra) == ("r", {})
    sides = lines(tmp_path, json.dumps({"prompt": "i", "completion": "r", "history": "x"}))
    [row] = read_rows(sides)
    write_rows(sides, [replace(row, extra={"score": 3})])
    assert json.loads(sides.read_text())["response"] == "r"
    assert row.extra == {}


def test_rows_without_an_id_get_one_of_what_they_say_and_each_its_own(tmp_path: Path) -> None:
    row, other = '{"prompt": "i", "completion": "r"}', '{"prompt": "j", "completion": "r"}'
    first = [row.id for row in read_rows(lines(tmp_path, row, other, row))]
    assert first[2] == f"{first[0]}-2"
    assert len(set(first)) == 3
    assert [row.id for row in read_rows(lines(tmp_path, other, row))] == [first[1], first[0]]
    ours = '{"instruction": "i", "response": "r"}'
    assert [row.id for row in read_rows(lines(tmp_path, ours))] == first[:1]


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_one_question_in_any_form(form: str, tmp_path: Path) -> None:
    path = lines(tmp_path, json.dumps(FORMS[form]))
    if form in {"texts", "one turn"}:
        assert read_prompts(path) == ["i"]
        return
    with pytest.raises(PastaError, match=r"rows\.jsonl:1: the prompt is a conversation"):
        read_prompts(path)


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("{", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
    "a list": ("[]", "not a JSON object"),
    "empty id": ('{"id": "", "instruction": "i", "response": "r"}', "the id is empty"),
    "numeric id": ('{"id": 7, "instruction": "i", "response": "r"}', "'id' is not a string"),
    "no response": ('{"id": "b", "instruction": "i"}', "no 'response'"),
    "null response": (
        '{"id": "b", "instruction": "i", "response": null}',
        "'response' is not a string",
    ),
    "no completion": ('{"prompt": "i"}', "no 'completion'"),
    "no list": ('{"messages": "i"}', "'messages' is not a list of messages"),
    "no content": ('{"messages": [{"role": "user"}]}', "no 'content'"),
    "parts of a content": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "i"}]}]}',
        "'content' is not a string",
    ),
    "a tool's turn": (
        '{"messages": [{"role": "tool", "content": "r"}]}',
        "unknown role 'tool'",
    ),
    "no answer": (
        '{"messages": [{"role": "user", "content": "i"}]}',
        "the conversation does not end with a user's message and its answer",
    ),
    "same id": (GOOD, "id 'a' was used before"),
    "half a pair": (
        '{"id": "b", "instruction": "i", "response": "\\ud800"}',
        "'response' holds half a surrogate pair",
    ),
    "not UTF-8": (b'{"id": "\xff"}', "not UTF-8 (byte 9)"),
    "too deep": ("[" * 100_000, "not JSON that can be read: too deep, or a number too long"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, case: str) -> None:
    line, what = BROKEN[case]
    path = lines(tmp_path, GOOD, line)
    with pytest.raises(PastaError) as caught:
        list(read_rows(path))
    assert str(caught.value) == f"{path}:2: {what}"


def test_broken_lines_are_reported_and_the_rest_is_kept_when_asked(tmp_path: Path) -> None:
    path = lines(tmp_path, "{", GOOD, GOOD, GOOD.replace('"a"', '"b"'))
    problems: list[PastaError] = []
    assert [row.id for row in read_rows(path, on_problem=problems.append)] == ["a", "b"]
    assert [str(problem).split(":")[1] for problem in problems] == ["1", "3"]


def test_prompts_need_only_an_instruction(tmp_path: Path) -> None:
    assert read_prompts(lines(tmp_path, '{"instruction": "i"}', "", GOOD)) == ["i", "i"]
    with pytest.raises(PastaError, match=r"rows\.jsonl:1: no 'instruction'"):
        read_prompts(lines(tmp_path, '{"id": "a"}'))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.jsonl.gz", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(PastaError, match="cannot read"):
        list(read_rows(tmp_path / name))


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, ROWS)
    for damaged in (path.read_bytes()[:-12], b"plain text"):
        path.write_bytes(damaged)
        with pytest.raises(PastaError, match="cannot read"):
            list(read_rows(path))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)

    def interrupted() -> Iterator[Row]:
        yield Row("c", "", "", "")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, interrupted())
    assert list(read_rows(path)) == ROWS
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match=r"cannot write .*rows\.jsonl: No such file or directory"):
        write_rows(tmp_path / "nowhere" / "rows.jsonl", ROWS)


def test_half_a_surrogate_pair_in_an_extra_key_survives(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Row("a", "", "", "", {"odd": "\ud800"})])
    assert next(iter(read_rows(path))).extra == {"odd": "\ud800"}
