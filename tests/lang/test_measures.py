"""Missing topics, empty items and text quality; others are tested where used."""

from __future__ import annotations

import pytest

from pasta_decoding.lang.measures import (
    echoes,
    empty_items,
    missing_topics,
    text_quality,
)
from pasta_decoding.lang.tree import read


def chunk(topic: str | None, text: str) -> str:
    named = f' topic="{topic}"' if topic else ""
    return f'<promise{named} tokens="20"/><async>{text}</async>'


@pytest.mark.parametrize(
    ("topic", "text", "missing"),
    [
        ("healthy diet", "Eat well and keep to a Diet.", 0),
        ("diets", "A good diet matters.", 0),
        ("slicing it", "You can slice it.", 0),
        ("use of oil", "Salt the water.", 1),
        ("oil", "Oil the pan.", 0),
        ("the budget", "The plan matters.", 1),
        ("diet", "", 1),
        (None, "Anything.", 0),
    ],
)
def test_a_topic_is_missing_if_none_of_its_longer_words_begins_a_word(
    topic: str | None, text: str, missing: int
) -> None:
    assert len(missing_topics(read(chunk(topic, text)))) == missing


def test_every_chunk_is_asked_for_its_own_topic() -> None:
    both = chunk("diet", "Sleep well.") + " " + chunk("sleep", "Sleep well.")
    assert len(missing_topics(read(both))) == 1


def test_a_chunk_is_echoed_if_the_main_text_says_most_of_it_too() -> None:
    said = "Salt the water well before it boils."
    text = said + chunk("salt", said) + chunk("oil", "Oil the pan with great care.") + said
    assert echoes(read(text)) == [0]
    assert echoes(read(chunk("salt", said) + chunk("oil", said))) == [], "siblings are repeats"


def test_repetition_costs_a_text_more_than_it_saves() -> None:
    assert text_quality(2.0, 0.0) == -2
    assert text_quality(1.0, 0.5) == -3


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("1. 1. 1.", 3),
        ("- - -", 3),
        ("Things: 1. 1. 1.", 3),
        ("1. 1. Eat well.", 1),
        ("1. Eat well.\n2.\n3. Sleep.", 1),
        ("- Eat well.\n-", 1),
        ("1.\n2.\n3.", 3),
        ("1. -", 1),
        ("1. - Eat well.", 0),  # an item of an item
        ("1. Eat well.\n2.\nSleep.", 0),  # the text of its own line
        ("1. Eat 3. Then sleep - or not.\n- a - b", 0),
        ("The sum of both is\n13.", 0),
        ("13.", 0),
        ("It was the year 5.", 0),
        ("---", 0),
        ("| - | - |", 0),
        ("", 0),
    ],
)
def test_an_empty_item_is_a_marker_without_text(text: str, empty: int) -> None:
    assert empty_items(text) == empty
