"""Checks of answers: each kind passes one answer and fails another; mistakes name file and line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.checks import KINDS, Check, read_checks, share_passed
from pasta_decoding.data.rows import question_of
from pasta_decoding.errors import PastaError

PROMPTS = Path(__file__).parents[2] / "data/preference_prompts.jsonl"
LIST = "Things:\n- one\n* two\n\u2022 three\n1. four\n  2) five\n-\n3. \n--- six"
# kind, arguments, an answer that passes, one that fails
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("words", {"at_most": 3}, "One - two, three!", "One two three four"),
    ("words", {"at_least": 2, "at_most": 3}, "One two", "One"),
    ("sentences", {"at_least": 2, "at_most": 2}, 'He said "No." Then he left', "Only one."),
    ("paragraphs", {"at_least": 2, "at_most": 2}, "One.\nYet one.\n \n\nTwo.", "One.\nYet one."),
    ("lines", {"at_most": 2}, "a\n\nb\n", "a\nb\nc"),
    ("items", {"at_least": 5, "at_most": 5}, LIST, "- one\n- two"),
    ("bullets", {"at_least": 3, "at_most": 3}, LIST, "1. one\n2. two\n3. three"),
    ("bullets", {"at_least": 0, "at_most": 0}, "1. one\n\n---", "- one"),
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
    ("ends", {"string": "Good night."}, 'He said "Good night".', "Good night, Sam."),
    ("ends", {"string": "?"}, "Shall we go?", "We shall go."),
    ("ends", {"string": "Sam"}, "Yours, Sam", "Yours, Balsam"),
    ("one_of", {"strings": ["Yes.", "No."]}, '"Yes".', "Yes and no."),
    ("one_of", {"strings": ["yes", "(b)"]}, "**Yes.**", "Yes, it is."),
    ("json", {"keys": ["a"]}, '```json\n{"a": 1, "b": 2}\n```', '{"b": 2}'),
    ("json", {"array": True, "length": 2}, "[1, 2]", "Here: [1, 2]"),
    ("json", {"array": True, "length": 1}, '[{"a": 1}]', '[{"a": 1}, {}]'),
    ("upper", {}, "STOP! 1 STEP", "STOP. Now"),
    ("lower", {}, "stop. 1 step", "stop. Now"),
    ("quoted", {}, '"All of it."', 'Some "of it"'),
    ("titled", {}, "The Bees\nThey fly.", "The bees fly.\nThey do."),
    ("titled", {}, "**On Bees: a long story.**\nThey fly.", "The Bees"),
    ("titled", {}, "# 1. Bread\nBuy it.", "1. Buy milk\n2. Go home"),
    ("total", {"value": 1050}, "20.\nTotal: 1,000 + 50 = $1,050.00\nBye to 3", "Total: 1000"),
    ("total", {"value": 12}, "That makes 12 in total.\nEnjoy your 2 days!", "In total 2 of 12: 2"),
    ("total", {"value": 13}, "6 + 7 = 13.", "6 + 7"),
]
HOSTILE_ANSWERS = [
    "\x00\ud800\u202e",
    "." * 50_000 + "a",
    "- " + " " * 50_000,
    "[" * 50_000,
    "*" * 50_001,
    "9" * 50_000,
    '{"a":' * 50_000,
    "\n \n" * 20_000 + "x",
    "total " * 10_000,
    "\u0660\u00b2",
    "1. " * 20_000,
]


@pytest.mark.parametrize(("kind", "arguments", "passing", "failing"), CASES)
def test_a_check_tells_two_answers_apart(
    kind: str, arguments: dict[str, Any], passing: str, failing: str
) -> None:
    check = Check(kind, arguments)
    assert share_passed([check], passing) == 1
    assert share_passed([check], failing) == 0
    assert share_passed([check], " \n") == 0


@pytest.mark.parametrize(
    ("answer", "sentences"),
    [
        ("One. Two! Three?", 3),
        ("It costs 3.50 dollars, e.g. at Mr. Lee's.", 1),
        ("Well... yes.", 2),
        ("1. First\n2. Second.", 2),
        ("A heading\n\nA sentence. And", 3),
        ("The U.S. economy grew at 5 p.m. today.", 1),
        ("She lives in the U.S. It is big.", 2),
        ("J. K. Rowling wrote it.", 1),
        ("Prof. Smith met No. 5.", 1),
        ("It has vitamin C. Eat it.", 2),
    ],
)
def test_sentences_are_counted_as_people_do(answer: str, sentences: int) -> None:
    check = Check("sentences", {"at_least": sentences, "at_most": sentences})
    assert share_passed([check], answer) == 1


def test_any_answer_has_its_share_in_linear_time() -> None:
    checks = {kind: Check(kind, arguments) for kind, arguments, *_ in CASES}
    assert checks.keys() == KINDS.keys()
    start_s = time.process_time()
    for answer in HOSTILE_ANSWERS:
        assert 0 <= share_passed(list(checks.values()), answer) <= 1
    assert time.process_time() - start_s < 20  # a pattern that backtracks takes minutes


def test_the_share_counts_all_checks() -> None:
    checks = [Check("lower"), Check("words", {"at_most": 2}), Check("ends", {"string": "you"})]
    assert share_passed(checks, "Thank you.") == pytest.approx(2 / 3)


def test_the_shipped_prompts_have_checks_of_every_kind() -> None:
    checks_by_prompt = read_checks([PROMPTS])
    checks = [check for checks in checks_by_prompt.values() for check in checks]
    assert {check.kind for check in checks} == KINDS.keys()
    instruction = "Explain in one sentence why leaves are green."
    assert checks_by_prompt[question_of(instruction).id] == [
        Check("sentences", {"at_least": 1, "at_most": 1})
    ]


def test_checks_are_read_by_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    upper = {"instruction": "Shout.", "checks": [{"kind": "upper"}]}
    short = {
        "instruction": "Shout.",
        "checks": [{"kind": "words", "arguments": {"at_most": 3}}],
    }
    lines = [upper, {"instruction": "Talk."}, {"instruction": "Sing.", "checks": []}, short]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_checks([path]) == {
        question_of("Shout.").id: [Check("upper"), Check("words", {"at_most": 3})]
    }


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        ("upper", "'checks' is not a list"),
        (["upper"], "a check is an object with 'kind' and 'arguments', not 'upper'"),
        ([{"kind": "haiku"}], "no check is called 'haiku'; there are words, sentences, "),
        ([{"kind": ["upper"]}], "no check is called ['upper']; there are "),
        ([{"kind": "words"}], "the check 'words' takes at_least, at_most, not {}"),
        (
            [{"kind": "words", "arguments": {"at_most": True}}],
            "the check 'words' takes at_least, at_most, not {'at_most': True}",
        ),
        (
            [{"kind": "upper", "arguments": {"at_least": 1}}],
            "the check 'upper' takes no arguments, not {'at_least': 1}",
        ),
        ([{"kind": "begins"}], "the check 'begins' takes string, not {}"),
        (
            [{"kind": "includes", "arguments": {"strings": ["a", " "]}}],
            "the check 'includes' takes strings, not {'strings': ['a', ' ']}",
        ),
        (
            [{"kind": "total", "arguments": {"value": None}}],
            "the check 'total' takes value, not {'value': None}",
        ),
    ],
)
def test_a_mistake_names_file_and_line(tmp_path: Path, checks: object, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"instruction": "a"}\n' + json.dumps({"instruction": "b", "checks": checks}))
    with pytest.raises(PastaError) as refused:
        read_checks([path])
    assert str(refused.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(refused.value)
