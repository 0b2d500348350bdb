"""Every verifier says yes and no, and bears with anything."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest

from pasta_decoding.data.checks import KINDS, count_sentences, make_check
from pasta_decoding.errors import PastaError

LIST = "Things:\n- one\n* two\n\u2022 three\n1. four\n  2) five\n-\n3. \n--- six"
# kind, arguments, a text that passes, one that fails
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("words", {"at_most": 3}, "One - two, three!", "One two three four"),
    ("words", {"at_least": 2, "at_most": 3}, "One two", "One"),
    ("sentences", {"at_least": 2, "at_most": 2}, 'He said "No." Then he left', "Only one."),
    ("paragraphs", {"at_least": 2, "at_most": 2}, "One.\nYet one.\n \n\nTwo.", "One.\nYet one."),
    ("lines", {"at_most": 2}, "a\n\nb\n", "a\nb\nc"),
    ("items", {"at_least": 5, "at_most": 5}, LIST, "- one\n- two"),
    ("bullets", {"at_least": 3, "at_most": 3}, LIST, "1. one\n2. two\n3. three"),
    ("numbered", {"at_least": 2, "at_most": 2}, LIST, "- one\n- two"),
    ("headings", {"at_least": 2}, "# One\ntext\n**Two**\ntext", "#One\nsome **two**"),
    ("bold", {"at_least": 2}, "**a** and **b c**", "*a* and **b"),
    ("placeholders", {"at_least": 2}, "Dear [name], on [date]", "Dear [name], on []"),
    ("occurs", {"word": "sun", "at_least": 2}, "Sun. The sun!", "The sun on Sunday."),
    ("occurs", {"word": "I", "at_most": 1}, "It is I.", "I think I am."),
    ("includes", {"strings": ["for  example", "C++"]}, "For\nexample, C++.", "For examples, C++."),
    ("includes_any", {"strings": ["7", "seven"]}, "Seven days.", "17 days."),
    ("excludes", {"strings": ["is", "and"]}, "This island, that sand.", "This is it."),
    ("without", {"characters": "z!"}, "No such letter.", "A Zebra."),
    ("begins", {"string": "Dear"}, "**Dear** Ann,", "Dearest Ann,"),
    ("begins", {"string": "Once upon a time"}, '"Once upon\na time there', "Once upon a tim"),
    ("ends", {"string": "The end"}, "So it was. *The end.*", "So it was. The end of it"),
    ("ends", {"string": "The end"}, "So it was. **The end**.", "The end. So it was."),
    ("ends", {"string": "Good night."}, 'He said "Good night".', "Good night, Sam."),
    ("ends", {"string": "?"}, "Shall we go?", "We shall go."),
    ("ends", {"string": "Sam"}, "Yours, Sam", "Yours, Balsam"),
    ("json", {"keys": ["a"]}, '```json\n{"a": 1, "b": 2}\n```', '{"b": 2}'),
    ("json", {"array": True, "length": 2}, "[1, 2]", "Here: [1, 2]"),
    ("json", {"array": True, "length": 1}, '[{"a": 1}]', '[{"a": 1}, {}]'),
    ("upper", {}, "STOP! 1 STEP", "STOP. Now"),
    ("lower", {}, "stop. 1 step", "stop. Now"),
    ("quoted", {}, '"All of it."', '"Some" of "it"'),
    ("titled", {}, "The Bees\nThey fly.", "The bees fly.\nThey do."),
    ("titled", {}, "**On Bees: a long story.**\nThey fly.", "The Bees"),
    ("titled", {}, "On Milk and Bread\nBuy both.", "- apples\n- pears"),
    ("titled", {}, "# 1. Bread\nBuy it.", "1. Buy milk\n2. Go home"),
    ("one_of", {"strings": ["Yes.", "No."]}, '"Yes".', "Yes and no."),
    ("one_of", {"strings": ["yes", "(b)"]}, "**Yes.**", "Yes, it is."),
    ("total", {"value": 1050}, "20.\nTotal: 1,000 + 50 = $1,050.00\nBye to 3", "Total: 1000"),
    ("total", {"value": 12}, "That makes 12 in total.\nEnjoy your 2 days!", "In total 2 of 12: 2"),
    ("total", {"value": 42}, "Subtotal 30, total 42.\nI am totally sure, 3 of 3.", "Total 3"),
    ("total", {"value": 42}, "Total:\n$42\nCome back in 3 days.", "Total:\n3\n42"),
    ("total", {"value": 13}, "6 + 7 = 13.", "6 + 7"),
]  # fmt: skip
HOSTILE = [
    "\x00\ud800\u202e", "." * 50_000 + "a", "- " + " " * 50_000, "[" * 50_000, "*" * 50_001,
    "9" * 50_000, '{"a":' * 50_000, "\n \n" * 20_000 + "x", "total " * 10_000, "\u0660\u00b2",
    '"' * 3, "1. " * 20_000, "<sync/><async>", "_" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), CASES)
def test_a_verifier_passes_the_one_and_fails_the_other(
    kind: str, arguments: dict[str, Any], good: str, bad: str
) -> None:
    check = make_check(kind, arguments)
    assert check.passes(good)
    assert not check.passes(bad)


def test_every_kind_is_among_the_cases() -> None:
    assert {case[0] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_too_strange_for_a_verifier(kind: str) -> None:
    arguments = next(case[1] for case in CASES if case[0] == kind)
    check = make_check(kind, arguments)
    began = time.process_time()
    assert {type(check.passes(text)) for text in HOSTILE} == {bool}
    assert time.process_time() - began < 20  # seconds; what backtracks takes minutes


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_answer_passes_nothing(kind: str) -> None:
    arguments = next(case[1] for case in CASES if case[0] == kind)
    assert not make_check(kind, arguments).passes(" \n")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("It costs 3.50 dollars, e.g. at Mr. Lee's.", 1),
        ("Well... yes.", 2),
        ("1. First\n2. Second.", 2),
        ("A heading\n\nA sentence. And", 3),
        ("...", 0),
        ("The U.S. economy grew at 5 p.m. today.", 1),
        ("She lives in the U.S. It is big.", 2),
        ("J. K. Rowling wrote it.", 1),
        ("Prof. Smith met No. 5.", 1),
        ("It has vitamin C. Eat it.", 2),
        ("Buy apples, pears, etc. Then bake.", 2),
    ],
)
def test_sentences_are_counted_as_people_do(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("kind", "arguments", "message", "hint"),
    [
        ("word", {}, "no check is called 'word'", "Is it 'words'?"),
        ("haiku", {}, "no check is called 'haiku'", "There are begins, "),
        ("words", {}, "the check 'words' lacks a bound", "at_least: int"),
        ("begins", {}, "lacks string", "It takes string: str."),
        ("words", {"at_most": "3"}, "does not take at_most = '3'", "at_most: int | None"),
        ("words", {"at_most": True}, "does not take at_most = True", "at_most"),
        ("words", {"text": "a"}, "does not take text = 'a'", "at_most"),
        ("includes", {"strings": "abc"}, "does not take strings = 'abc'", "list"),
        ("includes", {"strings": []}, r"does not take strings = \[\]", "list"),
        ("upper", {"at_least": 1}, "does not take at_least = 1", "It takes nothing"),
        ("includes", {"strings": ["a", " "]}, "does not take strings", "strings: list"),
        ("begins", {"string": " "}, "does not take string", "string: str"),
        ("total", {"value": None}, "does not take value = None", "value: float"),
    ],
)
def test_what_cannot_be_verified_is_refused_by_name(
    kind: str, arguments: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(PastaError, match=message) as refused:
        make_check(kind, arguments)
    assert hint in (refused.value.hint or "")


def test_every_argument_of_a_verifier_can_be_compared_with_json() -> None:
    known = {"int", "int | None", "float", "str", "bool", "list[str]", "list[str] | None"}
    for verifier in KINDS.values():
        parameters = list(inspect.signature(verifier).parameters.values())
        assert {one.annotation for one in parameters[1:]} <= known
