"""Which rows stay in a training set, and the reasons that drop the others."""

from collections.abc import Iterable
from typing import Any

import pytest

from pasta_decoding.data.build import SelectionLimits, contamination, measure_rows, select_rows
from pasta_decoding.data.rows import Row


def count_words(text: str) -> int:
    return len(text.split())


def rows_of(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(str(n), "s", prompt, response) for n, (prompt, response) in enumerate(pairs)]


def select(
    rows: Iterable[Row], *, exclude: Iterable[str] = (), **limits: Any
) -> tuple[list[Row], dict[str, int]]:
    return select_rows(rows, SelectionLimits(**limits), count_words, exclude)


def chunk(text: str) -> str:
    return f'<promise topic="a" tokens="20"/><async>{text}</async>'


TWO = f"Two: {chunk('Apples are red.')} {chunk('Pears are green.')}"


@pytest.mark.parametrize(
    ("limits", "prompt", "response", "reason"),
    [
        ({}, "Why?", " \n", "empty"),
        ({}, " ", "Because.", "empty"),
        ({}, "Why?", "a <async>b</async>", "malformed"),
        ({}, "Why?", TWO.replace("<", "\\<"), "annotated twice"),
        ({"max_total_tokens": 8}, "But why?", TWO, "length"),
    ],
)
def test_a_row_that_is_not_wanted_is_counted_under_its_reason(
    limits: dict[str, Any], prompt: str, response: str, reason: str
) -> None:
    assert select(rows_of((prompt, response)), **limits) == ([], {reason: 1})


def test_a_row_that_is_wanted_stays_as_it_is() -> None:
    rows = rows_of(("But why?", TWO))
    assert select(rows, max_total_tokens=9) == (rows, {})


def test_a_response_is_kept_once_and_a_prompt_as_often_as_wanted() -> None:
    rows = rows_of(("Why?", "One."), ("why", "one"), ("Why?", "Two."), ("Why?", "Three."))
    selected, dropped = select(rows, per_prompt=2)
    assert len(selected) == 2
    assert sum(dropped.values()) == 2
    assert select(rows)[1] == {"duplicate": 1}


def test_the_limit_keeps_the_same_rows_of_all_places() -> None:
    rows = rows_of(*((f"Why {n}?", "So.") for n in range(9)))
    assert select(rows, limit=4) == select(rows, limit=4) != (rows[:4], {"over the limit": 5})
    assert select(rows, limit=4)[1] == {"over the limit": 5}


EVALUATED = "What are the names of some famous actors that started their careers on Broadway?"


@pytest.mark.parametrize(
    "prompt",
    [
        EVALUATED,
        EVALUATED.upper().replace("?", " !"),
        f"Please tell me, in your own words: {EVALUATED}",
        "What are the names of some famous actors that started their careers elsewhere",
    ],
)
def test_an_evaluation_prompt_is_known_in_other_clothes(prompt: str) -> None:
    assert select(rows_of((prompt, "So.")), exclude=[EVALUATED]) == (
        [],
        {"in an evaluation set": 1},
    )


@pytest.mark.parametrize("prompt", ["Who?", "What are the names of some famous singers, then?"])
def test_another_prompt_is_not_taken_for_it(prompt: str) -> None:
    assert not contamination([EVALUATED, "Why is that so?"])(prompt)


def test_a_set_is_described_as_a_whole_and_by_the_first_word_of_its_sources() -> None:
    part = chunk(" ".join(["w"] * 30))
    rows = [
        Row("1", "a/x", "Why not?", f"{part} {part}<sync/> So."),
        Row("2", "a/y", "Why?", "So it is."),
        Row("3", "b", "Why?", "So."),
    ]
    figures = measure_rows(rows, count_words)
    assert (figures["rows"], figures["with_chunk"], figures["chunks"], figures["syncs"]) == (
        3,
        1,
        2,
        1,
    )
    assert figures["plain_tokens"] == {"sum": 65, "mean": 21.7, "p10": 1.4, "p50": 3.0, "p90": 49.4}
    assert figures["chunk_tokens"]["mean"] == 30
    assert list(figures["sources"]) == ["a", "b"]
    assert figures["sources"]["b"]["ideal_speedup"] == 1.0
    assert figures["sources"]["a"]["ideal_speedup_with_chunk"] == round(61 / 42, 3)
