"""Every feature from a text small enough to count by hand, and none of them from length alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.eval.judge.features import FEATURES, features

PROMPT = "Name two rivers in France."

CASES = [
    ("repeated_pairs", "a b a b", 1 / 3),
    ("repeated_fours", "a b c d a b c d", 1 / 5),
    ("repeated_lines", "one\ntwo\n\none", 1 / 3),
    ("repeated_sentences", "Yes. No. yes.", 1 / 3),
    ("repeated_openings", "- we go up here\n- we go up there", 0.5),
    ("commonest_word", "rivers rivers and the Seine", 2 / 5),
    ("distinct_words", "seine seine loire rhone", 3 / 4),
    ("asked_covered", "Two rivers: Seine, Loire.", 2 / 4),
    ("asked_in_first_sentence", "The Seine. Rivers!", 0.0),
    ("on_topic", "The rivers Seine", 1 / 2),
    ("copied", "Name two rivers. Seine", 1 / 2),
    ("copied_at_start", "seine " * 13 + PROMPT, 0.0),
    ("has_list", "1. Seine\n2. Loire", 1.0),
    ("items", "- Seine\n- Loire\n- Rhone", math.log1p(3)),
    ("item_rate", "* Seine\n* Loire", 1.0),
    ("headings", "# Rivers\n**Seine**\ntext", math.log1p(2)),
    ("bold", "**Seine**", math.log1p(2)),
    ("code", "```\nx\n```", 1.0),
    ("paragraphs", "a\n\nb", math.log1p(1)),
    ("lines", "a\nb\nc", math.log1p(2)),
    ("word_chars", "a bbb", 2.0),
    ("function_words", "the Seine", 0.5),
    ("words_astray", "The river is the of a.", 2 / 3),
    ("sentence_words", "One two three. Four.", math.log1p(2)),
    ("sentence_spread", "One two three. Four.", math.log1p(1)),
    ("longest_sentence", "One two three. Four.", math.log1p(3)),
    ("not_ascii", "Rhône", 1 / 5),
    ("capitals", "Seine", 1 / 5),
    ("digits", "a1b2", 0.5),
    ("punctuation", "a, b", 0.25),
    ("exclamations", "Go now!", 0.5),
    ("questions", "Go now?", 0.5),
    ("ends_a_sentence", "Seine. ", 1.0),
    ("ends_a_bracket", "(Seine)", 1.0),
    ("ends_in_a_word", "the", 1.0),
    ("ends_half", "the Seine,", 1.0),
    ("almost_empty", "Seine and Loire", 1.0),
    ("starts_small", " seine", 1.0),
    ("refuses_at_once", "I\u2019m sorry, but no.", 1.0),
    ("refuses_at_once", "x" * 300 + " I'm sorry", 0.0),
    ("refuses", "x" * 300 + " I'm sorry", 1.0),
    ("polite_opener", "Sure! The Seine.", 1.0),
    ("template_leaks", "Seine\nHuman: thanks", 1.0),
    ("first_person", "I like my Seine", 0.5),
    ("second_person", "you're here", 0.5),
]


@pytest.mark.parametrize(("name", "answer", "expected"), CASES)
def test_a_feature_by_hand(name: str, answer: str, expected: float) -> None:
    assert features(PROMPT, answer)[name] == pytest.approx(expected)


def test_text_that_can_be_squeezed_is_told_from_text_that_cannot() -> None:
    assert features("", "abc " * 100)["compressed"] < 0.1
    assert features("", PROMPT)["compressed"] > 0.5


def test_an_empty_answer_is_all_zero_but_for_being_empty() -> None:
    assert {name: value for name, value in features(PROMPT, "").items() if value} == {
        "almost_empty": 1.0
    }


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_has_all_features_in_their_order_and_finite(prompt: str, answer: str) -> None:
    found = features(prompt, answer)
    assert tuple(found) == FEATURES
    assert all(math.isfinite(value) for value in found.values())
