"""What a file asks of answers, and whether one does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pasta_decoding.data.asked import asked_of, each_once, read_all_asked
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.tree import read

CHUNK = '<promise topic="fares" tokens="10"/><async>The railway takes 45 dollars.</async>'
SYNCED = f"{CHUNK}<sync/>So take the railway with its 45 dollars."
PLAIN = "It takes 45 dollars."


def written(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("asks", "met"),
    [
        ({}, (True, True, True)),
        ({"plain": True}, (False, False, True)),
        ({"needs_sync": True}, (False, True, False)),
        ({"needs_sync": False}, (True, False, True)),
        ({"checks": [{"kind": "words", "arguments": {"at_most": 5}}]}, (True, False, True)),
    ],
)
def test_an_answer_is_held_against_all_that_is_asked(
    tmp_path: Path, asks: dict[str, object], met: tuple[bool, ...]
) -> None:
    (asked,) = read_all_asked(written(tmp_path, {"instruction": "What does it cost?", **asks}))
    assert tuple(asked.is_met(read(text)) for text in (CHUNK, SYNCED, PLAIN)) == met


def test_any_form_of_a_prompt_will_do_and_nothing_need_be_asked(tmp_path: Path) -> None:
    message = {"messages": [{"role": "user", "content": "Why?"}]}
    found = read_all_asked(written(tmp_path, message, {"prompt": "How?"}))
    assert [one.instruction for one in found] == ["Why?", "How?"]
    assert found[0].id == asked_of("Why?").id


def test_what_cannot_be_verified_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, {"instruction": "Why?"}, {"instruction": "How?", "plain": "yes"})
    with pytest.raises(PastaError, match=r"prompts.jsonl:2: 'plain' is no bool"):
        read_all_asked(path)


def test_a_prompt_without_a_name_is_called_by_its_line_and_no_two_have_one_name(
    tmp_path: Path,
) -> None:
    found = read_all_asked(
        written(tmp_path, {"instruction": "Why?", "id": None}, {"instruction": "How?", "id": None})
    )
    assert [one.name for one in found] == ["1", "2"]
    twice = written(
        tmp_path, {"instruction": "Why?", "id": "a"}, {"instruction": "How?", "id": "a"}
    )
    with pytest.raises(PastaError, match=r"prompts.jsonl:2: id 'a' was used before"):
        read_all_asked(twice)


def test_of_prompts_with_the_same_text_the_first_is_kept() -> None:
    first, other, again = asked_of("Why?"), asked_of("How?"), asked_of("Why?")
    assert each_once([first, other, again]) == [first, other]
