"""Echoes and empty items. The tests of other measures are with the code that uses them."""

import pytest

from pasta_decoding.lang.measures import echoes, empty_items
from pasta_decoding.lang.tree import read


def chunk(topic: str, text: str) -> str:
    return f'<promise topic="{topic}" tokens="20"/><async>{text}</async>'


def test_a_chunk_is_echoed_if_the_main_text_says_most_of_it() -> None:
    salt = "Salt the water well before it boils."
    text = salt + chunk("salt", salt) + chunk("oil", "Oil the pan with great care.") + salt
    assert echoes(read(text)) == [0]
    assert echoes(read(chunk("salt", salt) + chunk("oil", salt))) == [], "siblings are repeats"


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("1. 1. 1.", 3),
        ("Things: 1. 1. 1.", 3),
        ("1. Eat well.\n2.\n3. Sleep.", 1),
        ("- Eat well.\n-", 1),
        ("1.\n2.\n3.", 3),
        ("1. - Eat well.", 0),  # an item of an item
        ("1. Eat well.\n2.\nSleep.", 0),  # the text of its own line
        ("1. Eat 3. Then sleep - or not.\n- a - b", 0),
        ("The sum of both is\n13.", 0),
        ("", 0),
    ],
)
def test_an_empty_item_is_a_marker_without_text(text: str, empty: int) -> None:
    assert empty_items(text) == empty
