"""Files of rows and prompts: a written file reads back, and errors name file and line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.rows import (
    Question,
    Row,
    numbered_rows,
    question_of,
    read_pairs,
    read_prompts,
    read_questions,
    read_rows,
    write_rows,
)
from pasta_decoding.errors import PastaError
from tests.examples import few

GOOD = '{"id": "a", "source": "s", "instruction": "i", "response": "r"}'
ROWS = [Row("a", "s", "i", "r"), Row("b", "", "é", "<async>", {"verdict": "kept", "ids": [1, 2]})]
TEXT = st.text('ab"\\\n\r\u2028\x00\xe9\U0001f35d<>', max_size=4)
JSON = st.none() | st.booleans() | st.integers() | TEXT | st.lists(st.integers(), max_size=3)
EXTRA = st.dictionaries(TEXT.map("x_".__add__), JSON, max_size=2)


def write_lines(tmp_path: Path, *rows: str | bytes, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    raw = b"\n".join(row.encode() if isinstance(row, str) else row for row in rows)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
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
        write_rows(path, rows)
        assert list(read_rows(path)) == rows
        written = path.read_bytes()
        write_rows(path, rows)
        assert path.read_bytes() == written, "the same rows give the same bytes"


# Forms

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "i"}
ANSWER = {"role": "assistant", "content": "r"}
SHAREGPT = [{"from": "human", "value": "i"}, {"from": "gpt", "value": "r"}]
OURS: dict[str, object] = {"instruction": "i", "response": "r"}
FORMS: list[tuple[dict[str, object], str, list[str]]] = [
    (OURS, "i", []),
    ({"prompt": "i", "completion": "r"}, "i", []),
    ({"prompt": "i", "response": "r", "id": "", "source": None}, "i", []),
    ({"messages": [USER, ANSWER]}, "i", []),
    ({"conversations": SHAREGPT}, "i", []),
    (
        {"messages": [USER | {"content": [{"type": "text", "text": "i"}] * 2}, ANSWER]},
        "i\ni",
        [],
    ),
    (
        {"messages": [USER | {"content": [{"text": text} for text in ("", "i", " ")]}, ANSWER]},
        "i",
        [],
    ),
    (OURS | {"id": 1.0}, "i", []),
    ({"instruction": "", "input": "i", "output": "r"}, "i", []),
    ({"instruction": " \n", "context": "i", "response": "r", "system": " "}, "i", []),
    ({"instruction": "i", "input": "", "output": "r"}, "i", []),
    ({"instruction": "Sum up.", "context": "x", "response": "r"}, "Sum up.\n\nx", []),
    ({"messages": [USER, ANSWER], "response": "OTHER"}, "i", []),
    ({"messages": [SYSTEM | {"role": "developer"}, USER, ANSWER]}, "i", ["system"]),
    (OURS | {"system_prompt": "Be brief."}, "i", ["system"]),
    ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, "i", ["system"]),
    ({"messages": [USER, ANSWER, USER, ANSWER]}, "i", ["user", "assistant"]),
    ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, "i", ["system"]),
]


@pytest.mark.parametrize(("fields", "instruction", "roles"), FORMS)
def test_rows_of_other_programs_are_read_and_written_as_our_own(
    fields: dict[str, object], instruction: str, roles: list[str], tmp_path: Path
) -> None:
    path = write_lines(tmp_path, json.dumps(fields | {"score": 3}))
    [row] = read_rows(path)
    assert (row.source, row.instruction, row.response, row.extra) == (
        "",
        instruction,
        "r",
        {"score": 3},
    )
    assert [message.role for message in row.history] == roles
    if not roles:
        assert read_prompts(path) == [instruction]
    else:
        with pytest.raises(PastaError, match=r"rows\.jsonl:1: the prompt is a conversation"):
            read_prompts(path)
    write_rows(path, [row])
    assert json.loads(path.read_text())["instruction"] == instruction
    assert list(read_rows(path)) == [row]


def test_a_broken_pair_is_named_by_file_and_number(tmp_path: Path) -> None:
    pairs: list[tuple[dict[str, object], str]] = [
        ({"prompt": "i", "chosen": "r"}, "no 'rejected'"),
        ({"chosen": "r", "rejected": "s"}, "no 'instruction'"),
        ({"prompt": "i", "chosen": 1, "rejected": "s"}, "'chosen' is not a string"),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, USER, ANSWER]},
            "'chosen' and 'rejected",
        ),
        ({"prompt": "i", "chosen": [], "rejected": [ANSWER]}, "the conversation does not end with"),
    ]
    for fields, message in pairs:
        with pytest.raises(PastaError, match=rf"rows\.jsonl:1: {message}"):
            list(read_pairs(write_lines(tmp_path, json.dumps(fields))))


def test_rows_without_an_id_get_one_of_what_they_say_and_each_its_own(tmp_path: Path) -> None:
    row = '{"prompt": "i", "completion": "r"}'
    other = '{"prompt": "j", "completion": "r"}'
    first = [row.id for row in read_rows(write_lines(tmp_path, row, other, "", row))]
    assert first[2] == f"{first[0]}-2"
    assert len(set(first)) == 3
    assert [row.id for row in read_rows(write_lines(tmp_path, other, row))] == [first[1], first[0]]
    ours = '{"instruction": "i", "response": "r"}'
    assert [row.id for row in read_rows(write_lines(tmp_path, ours))] == first[:1]
    counted = write_lines(tmp_path, *(GOOD.replace('"a"', n).replace('"s"', n) for n in "77"))
    assert [row.id for row in read_rows(counted, counted)] == ["7", "7-2", "7-3", "7-4"]


# Bad input


def turn(**fields: object) -> str:
    """Return the line of a row with one message."""
    return json.dumps({"messages": [fields]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
        ("[]", "not a JSON object"),
        ('{"id": "b", "instruction": "i"}', "no 'response'"),
        ('{"prompt": "i"}', "no 'completion'"),
        ('{"messages": "i"}', "'messages' is not a list of messages"),
        (turn(role="user", content=[{"type": "image"}]), "'content' is not a string"),
        (
            turn(role="tool", content="r"),
            "unknown role 'tool': roles are system, user, assistant",
        ),
        (
            turn(role="user", content="i"),
            "the conversation does not end with a user's message and",
        ),
        ('{"messages": [], "images": [1]}', "'images' has no place in a prompt of 'messages'"),
        (turn(role="user", content="i", thinking="x"), "'thinking' has no place in a message"),
        ('{"prompt": "", "image": "i"}', "'image' has no place in a prompt of 'prompt'"),
        (turn(role="user", content="i", weight=0), "the answer is marked as one not to learn"),
        (
            json.dumps({"messages": [SYSTEM, USER, ANSWER], "system": "x"}),
            "'system' stands besi",
        ),
        ('{"instruction": "i", "response": "\\ud800"}', "'response' holds half a surrogate pair"),
        (b'{"id": "\xff"}', "not UTF-8 (byte 9)"),
        ("[" * 100_000, "not JSON that can be read: too deep, or a number too long"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(
    line: str | bytes, message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path, GOOD, "", line, GOOD.replace('"a"', '"z"'))
    with pytest.raises(PastaError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}:3: {message}")
    ids_and_errors = [getattr(row, "id", str(row)) for _, row in numbered_rows(path)]
    assert ids_and_errors == ["a", str(caught.value), "z"]


def test_a_broken_prompt_file_is_refused_with_its_place(tmp_path: Path) -> None:
    files: list[tuple[str | bytes, str]] = [
        ('\n{"instruction": " \\n"}', ":2: the prompt is empty"),
        ('{"instruction": "a"}\n{"instruction": "a"}', ":2: the same prompt came before"),
        ("", " holds no prompt"),
        ('[\n{"instruction": "a"},\n{"instruction" "b"}]', ": not JSON: Expecting ':' "),
        ('[{"instruction": "a"}, 3]', ":2: not a JSON object"),
        (b'[\n{"instruction": "\xff"}]', ": not UTF-8 (byte 20)"),
    ]
    for contents, message in files:
        path = write_lines(tmp_path, contents)
        with pytest.raises(PastaError) as caught:
            read_questions(path)
        assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz", "alpaca_eval.json"])
def test_prompts_are_lines_or_a_list_as_alpaca_eval_has_them(name: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "Why?", "dataset": "koala", "output": "", "generator": "x"},
        {"instruction": "How?"},
    ]
    is_list = name.endswith(".json")
    text = "\n " + json.dumps(rows, indent=1) if is_list else "\n".join(map(json.dumps, rows))
    path = write_lines(tmp_path, b"\xef\xbb\xbf" * is_list + text.encode(), name=name)
    assert read_questions(path) == [question_of("Why?", "koala"), question_of("How?")]
    assert read_prompts(path) == ["Why?", "How?"]
    assert question_of("How?") == Question("0ea5977074d19b32", "How?", None)


# Files


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, ROWS)
    contents = path.read_bytes()
    for broken in (contents[:-12], b"plain text", None):
        path.unlink() if broken is None else path.write_bytes(broken)
        with pytest.raises(PastaError, match=r"cannot read .*rows\.jsonl\.gz"):
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
    with pytest.raises(PastaError, match=r"cannot write .*rows\.jsonl: No such file or directory"):
        write_rows(tmp_path / "nowhere" / "rows.jsonl", ROWS)
