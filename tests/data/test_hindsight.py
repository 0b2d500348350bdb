"""Requests that a response meets: what can be asked of which, and rows that ask it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.asked import read_all_asked
from pasta_decoding.data.dataset import Row, write_rows
from pasta_decoding.data.hindsight import (
    relabelled,
    requests_of,
    with_other_markers,
    with_twins,
)
from pasta_decoding.lang.tree import read, strip

BULLETS = "- **Tea**: hot leaves in water\n- **Milk**: white and cold"
CHUNKS = (
    '1. <promise topic="tea" tokens="20"/><async>Tea is hot.</async>\n'
    '2. <promise topic="milk" tokens="20"/><async>Milk is cold.</async>'
)
PROSE = "Tea warms people. It grows on hills.\n\nMilk comes from cows."


def asked(instruction: str, response: str) -> dict[str, list[dict[str, object]]]:
    """Return the arguments of all requests that a hundred draws made, by their kinds."""
    found: dict[str, list[dict[str, object]]] = {}
    for seed in range(100):
        for one in requests_of(instruction, response, random.Random(seed)):
            assert one.check.passes(response), one
            found.setdefault(one.check.kind, []).append(dict(one.check.arguments))
    return found


def test_a_bulleted_list_is_asked_for_its_bullets() -> None:
    found = asked("Two drinks?", BULLETS)
    assert {"at_least": 2, "at_most": 2} in found["bullets"]
    assert all(one["at_least"] == 2 for one in found["bullets"])
    assert "numbered" not in found
    assert "sentences" not in found
    assert found["bold"]


def test_a_numbered_list_is_asked_for_its_numbers() -> None:
    found = asked("Two drinks?", strip(read(CHUNKS)))
    assert found["numbered"] == [{"at_least": 2, "at_most": 2}] * 100
    assert "bullets" not in found


def test_prose_is_asked_for_its_sentences_paragraphs_and_words() -> None:
    found = asked("What of cocoa and drinks?", PROSE)
    assert {one["at_most"] for one in found["sentences"]} == {3}
    assert {one["at_most"] for one in found["paragraphs"]} == {2}
    assert {one["at_most"] for one in found["words"] if "at_most" in one} == {15}
    assert {tuple(one["strings"]) for one in found["excludes"]} == {("cocoa",), ("drinks",)}  # type: ignore[arg-type]
    assert {str(one["string"]).split()[0] for one in found["begins"]} == {"Tea"}
    assert {str(one["string"]).split()[-1] for one in found["ends"]} == {"cows."}
    assert all(word not in "what of cocoa" for one in found["includes"] for word in one["strings"])  # type: ignore[attr-defined]


def test_what_is_to_be_avoided_is_a_whole_word_of_the_question() -> None:
    question = "Describe Washington and McDonalds for Shakespeare."
    avoided = {str(one["strings"]) for one in asked(question, PROSE)["excludes"]}
    assert avoided == {
        "['describe']", "['washington']", "['mcdonalds']", "['shakespeare']"
    }  # fmt: skip


@given(st.text(max_size=200), st.text(max_size=200), st.integers(0, 5))
def test_whatever_is_asked_is_done(instruction: str, response: str, seed: int) -> None:
    for one in requests_of(instruction, response, random.Random(seed)):
        assert one.check.passes(response)
        assert one.sentence.strip()


def test_rows_keep_their_answers_and_say_what_they_were_asked(tmp_path: Path) -> None:
    rows = [Row("a", "s", "Two drinks?", CHUNKS), Row("b", "s", "Nothing?", "")]
    made = list(relabelled(rows, 2, random.Random(0)))
    assert [row.id for row in made] == ["a-asked"]
    assert made[0].response == CHUNKS
    assert made[0].instruction.startswith("Two drinks? ")
    write_rows(tmp_path / "asked.jsonl", made)
    (one,) = read_all_asked(tmp_path / "asked.jsonl")
    assert 1 <= len(one.checks) <= 2
    assert one.is_met(read(CHUNKS))


@pytest.mark.parametrize("seed", range(20))
def test_two_requests_never_speak_of_the_same(seed: int) -> None:
    (row,) = relabelled([Row("a", "s", "Drinks?", PROSE)], 3, random.Random(seed))
    kinds = [check["kind"] for check in row.extra["checks"]]  # type: ignore[attr-defined]
    assert len(
        {"length" if k in ("words", "sentences", "paragraphs") else k for k in kinds}
    ) == len(kinds)


CHUNKED_BULLETS = CHUNKS.replace("1. ", "- ").replace("2. ", "- ")


@pytest.mark.parametrize(
    ("response", "other"),
    [
        (CHUNKS, CHUNKED_BULLETS),
        (CHUNKED_BULLETS, CHUNKS),
        (
            '<promise topic="a" tokens="20"/><async>* Tea\n* Milk</async>',
            '<promise topic="a" tokens="20"/><async>1. Tea\n2. Milk</async>',
        ),
        ("Few:\n\n1) Tea - hot\n2) Milk 3. Water", "Few:\n\n- Tea - hot\n- Milk 3. Water"),
        ("No list - and 1. nothing of one", None),
        ("- Tea\n  - green\n- Milk", None),
        ("1. Tea\n- Milk", None),
        ("3. Tea\n4. Milk", None),
        ("", None),
    ],
)
def test_other_markers(response: str, other: str | None) -> None:
    assert with_other_markers(response) == other


def test_twins_ask_for_their_own_markers_and_say_the_same_otherwise() -> None:
    rows = [Row("l", "s", "Two drinks?", CHUNKS), Row("p", "s", "Why?", PROSE)]
    found = list(with_twins(rows, random.Random(1)))
    assert [(row.id, row.response) for row in found] == [
        ("l-numbered", CHUNKS),
        ("l-bullets", CHUNKED_BULLETS),
    ]
    assert all(row.instruction.startswith("Two drinks? ") for row in found)
    assert found[0].instruction != found[1].instruction
