"""Which rows stay in a training set: every reason against one, in the order in which it counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import pytest

from pasta_decoding.data.build import Builder, Wanted, holds_code, named_topics
from pasta_decoding.data.contamination import Contamination
from pasta_decoding.data.dataset import Row, is_held_out
from pasta_decoding.lang.tree import read


def count_words(text: str) -> int:
    return len(text.split())


def chunk(topic: str, text: str, tokens: int = 20) -> str:
    return f'<promise topic="{topic}" tokens="{tokens}"/><async>{text}</async>'


def rows_of(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(str(n), "s", prompt, response) for n, (prompt, response) in enumerate(pairs)]


def built(
    rows: Iterable[Row], *, exclude: Iterable[str] = (), speaks: str = "en", **wanted: Any
) -> tuple[list[Row], dict[str, int]]:
    builder = Builder(Wanted(**wanted), count_words, lambda _text: speaks, Contamination(exclude))
    return list(builder.build(rows)), dict(builder.dropped)


TWO = f"Two: {chunk('apples', 'Apples are red.')} {chunk('pears', 'Pears are green.')}"


@pytest.mark.parametrize(
    ("wanted", "prompt", "response", "reason"),
    [
        ({}, "Why?", " \n", "empty"),
        ({}, " ", "Because.", "empty"),
        ({}, "Why?", "a <async>b</async>", "malformed"),
        ({"code": False}, "Why?", "So:\n```\nx\n```", "code"),
        ({"min_chunks": 3}, "Why?", TWO, "few chunks"),
        ({"min_chunks": 1, "min_chunk_tokens": 30}, "Why?", TWO, "few chunks"),
        ({"min_chunks": 1, "min_chunk_tokens": 20}, "Why?", chunk("a", "b", 300), "few chunks"),
        ({"named_topics": 0.6}, "Why?", TWO.replace('"pears"', '"plums"'), "topics not named"),
        ({"min_tokens": 8}, "Why?", TWO, "length"),
        ({"max_tokens": 6}, "Why?", TWO, "length"),
        ({"max_prompt_tokens": 1}, "But why?", TWO, "length"),
        ({"max_total_tokens": 8}, "But why?", TWO, "length"),
        ({"language": "fr"}, "Why?", TWO, "language"),
    ],
)
def test_a_row_that_is_not_wanted_is_counted_under_its_reason(
    wanted: dict[str, Any], prompt: str, response: str, reason: str
) -> None:
    assert built(rows_of((prompt, response)), **wanted) == ([], {reason: 1})


def test_a_row_that_is_wanted_stays_as_it_is() -> None:
    rows = rows_of(("But why?", TWO))
    kept, dropped = built(
        rows,
        min_chunks=2,
        named_topics=1.0,
        language="en",
        min_tokens=7,
        max_tokens=7,
        max_prompt_tokens=2,
        max_total_tokens=9,
    )
    assert (kept, dropped) == (rows, {})


def test_a_response_is_kept_once_and_a_prompt_as_often_as_wanted() -> None:
    rows = rows_of(("Why?", "One."), ("why", "one"), ("Why?", "Two."), ("Why?", "Three."))
    kept, dropped = built(rows, per_prompt=2)
    assert len(kept) == 2
    assert sum(dropped.values()) == 2
    assert built(rows)[1] == {"duplicate": 1}


def test_the_limit_keeps_the_same_rows_whatever_order_a_seed_gives() -> None:
    rows = rows_of(*((f"Why {n}?", "So.") for n in range(9)))
    assert built(rows, limit=4, seed=1) == built(rows, limit=4, seed=1)
    assert built(rows, limit=4, seed=1)[0] != built(rows, limit=4, seed=2)[0]
    assert built(rows, limit=4)[1] == {"over the limit": 5}


def test_the_instruction_can_be_cut_out_of_its_wrapping() -> None:
    rows = rows_of(("[Q]: Why?\nReally? [R]: long", "So."), ("Why not?", "So."))
    kept, _ = built(rows, question=r"\[Q\]:(.*)\[R\]")
    assert {row.instruction for row in kept} == {"Why?\nReally?", "Why not?"}


def test_the_two_splits_share_no_row_and_miss_none() -> None:
    rows = rows_of(*((f"Why {n}?", "So.") for n in range(40)))
    train, held_out = built(rows, split="train")[0], built(rows, split="held-out")[0]
    assert {row.id for row in train} | {row.id for row in held_out} == {row.id for row in rows}
    assert all(is_held_out(row.id) for row in held_out)
    assert not any(is_held_out(row.id) for row in train)


def test_a_row_is_held_out_where_the_hash_of_its_id_is_a_multiple_of_four() -> None:
    digest = hashlib.sha256(b"a").hexdigest()
    assert is_held_out("a") is (digest[-1] in "048c")


# Contamination

ASKED = "What are the names of some famous actors that started their careers on Broadway?"


@pytest.mark.parametrize(
    "prompt",
    [
        ASKED,
        ASKED.upper().replace("?", " !"),
        f"Please tell me, in your own words: {ASKED}",
        "What are the names of some famous actors that started their careers elsewhere",
    ],
)
def test_an_evaluation_prompt_is_known_in_other_clothes(prompt: str) -> None:
    assert prompt in Contamination([ASKED])
    assert built(rows_of((prompt, "So.")), exclude=[ASKED]) == ([], {"in an evaluation set": 1})


@pytest.mark.parametrize("prompt", ["Who?", "What are the names of some famous singers, then?"])
def test_another_prompt_is_not_taken_for_it(prompt: str) -> None:
    assert prompt not in Contamination([ASKED, "Why is that so?"])


# Code, topics

FENCED = "So:\n```python\nx\n```"


@pytest.mark.parametrize(("plain", "expected"), [("def f():\n    return 1", True), (FENCED, True)])
def test_code_is_recognised(plain: str, expected: bool) -> None:
    assert holds_code(plain) is expected


def test_prose_that_speaks_of_classes_is_no_code() -> None:
    assert not holds_code("Join a class.\n- import duties are high\nThey return; we do not.")


def test_a_topic_may_be_named_right_before_its_chunk() -> None:
    tree = read(f"Apples: {chunk('apples', 'They are red.')}\n{chunk('pears', 'They are green.')}")
    assert named_topics(tree) == 0.5
    assert named_topics(read("None.")) == 1.0
