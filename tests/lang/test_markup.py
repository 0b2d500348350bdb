"""Lifting markup: the text stays, a second lift changes nothing, and the checker has no warning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.check import WARNINGS, check, warn
from pasta_decoding.lang.markup import lift_markup, opening_markup
from pasta_decoding.lang.tree import Chunk, Span, Sync, read, strip, text_form

PIECES = ["1. ", "- ", "## ", "**", "*", "_", "__", "a", "b c", " ", "\n", "\\", "<sync/>"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
CHUNK = st.builds("".join, st.tuples(st.just('<promise topic="a" tokens="20"/><async>'), TEXT))
SOURCE = st.lists(TEXT | CHUNK.map(lambda text: f"{text}</async>"), max_size=5).map("".join)


@given(SOURCE)
def test_lifting_moves_markup_and_nothing_else(source: str) -> None:
    tree = read(source)
    lifted = lift_markup(tree)
    assert strip(lifted) == strip(tree)
    assert lift_markup(lifted) == lifted
    assert read(text_form(lifted)) == lifted
    assert warn(text_form(lifted)) == []
    tags = [[type(node) for node in nodes if type(node) is not Span] for nodes in (tree, lifted)]
    assert tags[0] == tags[1]
    assert bool(warn(text_form(tree))) == (lifted != tree)


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("**Tea**: hot", "**"),
        ("1. **Tea**: hot", "1. **"),
        ("- _Green tea_ is hot", "- _"),
        ("***Tea*** is hot", "***"),
        ("## Tea\nIt is hot.", "## "),
        ("\u2022 Tea", "\u2022 "),
        ("Tea **hot**", ""),
        ("-5 degrees", ""),
        ("3.5 litres", ""),
        ("#1 of all teas", ""),
        ("*args are the rest", ""),
        ("__init__ makes it", ""),
        ("`**kwargs`", ""),
        ("**Tea, cut in the middle", ""),
        ("1. ", ""),
    ],
)
def test_markup_is_what_opens_an_item_and_not_what_words_begin_with(text: str, markup: str) -> None:
    assert opening_markup(text) == markup


def test_the_main_thread_gets_the_markup_behind_its_own_text() -> None:
    tree = (Span("1. "), Chunk("tea", 20, "**Tea**: hot"), Sync(), Chunk("milk", 20, "- cold"))
    assert lift_markup(tree) == (
        Span("1. **"),
        Chunk("tea", 20, "Tea**: hot"),
        Sync(),
        Span("- "),
        Chunk("milk", 20, "cold"),
    )


def test_a_warning_is_no_error_and_names_where_the_markup_stands() -> None:
    text = 'Drinks:\n1. <promise topic="tea" tokens="20"/><async>**Tea**: hot</async>'
    assert check(text) == []
    [warning] = warn(text)
    column = text.index("**Tea") - text.index("1. ") + 1
    assert (warning.line, warning.column, warning.rule) == (2, column, "markup-in-chunk")
    assert warning.message == WARNINGS["markup-in-chunk"]
