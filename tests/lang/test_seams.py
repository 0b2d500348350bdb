"""Seams between siblings, each with an answer that has it and the nearest one that has not."""

import math

import pytest

from pasta_decoding.lang.item_requests import requested_items
from pasta_decoding.lang.seams import find_seams, shared_lines
from pasta_decoding.lang.tree import read

PROMPT = "How can I sleep better?"


def seams_of(answer: str, prompt: str = PROMPT) -> list[str]:
    """Return the seams of an answer whose chunks stand in double brackets."""
    opening = '<promise topic="a" tokens="20"/><async>'
    return find_seams(prompt, read(answer.replace("[[", opening).replace("]]", "</async>"))).names


WITH_SEAMS = {
    "a title on one item only": (["mixed_markup"], "1. **[[Tea**: hot]]\n2. [[Milk: cold]]"),
    "a title by main text alone": (["mixed_markup"], "- **Tea:** hot\n- Milk\n- Beer"),
    "a title that the chunk opens": (["mixed_markup"], "1. [[**Tea**: hot]]\n2. [[Milk: cold]]"),
    "a title with a full stop": (["mixed_markup"], "- [[**Hot.** Tea]]\n- [[Milk]]"),
    "one sentence twice": (
        ["shared_lines"],
        "[[Rest. This helps you to sleep.]] [[Read a book: this helps you to sleep!]]",
    ),
    "the next bullet": (["outer_items"], "- [[Tea\n- Milk]]\n- [[Milk]]"),
    "the next number": (["outer_items"], "1. [[Tea\n2. Milk]]\n2. [[Milk]]"),
    "a bullet of the outer list": (
        ["outer_items"],
        "- Hot\n  - [[Tea\n- Cold]]\n- Cold\n  - [[Milk]]",
    ),
    "a plain item": (["partial_list"], "1. [[Tea]]\n2. Milk\n3. [[Beer]]"),
    "a plain item before a sync": (["partial_list"], "1. [[Tea]]\n2. Milk\n3. <sync/>Both"),
}
WITHOUT_SEAMS = {
    "no list": "Sleep [[well]] and [[long]].",
    "every item has a title": "1. **[[Tea**: hot]]\n\n2. **[[Milk**: cold]]",
    "bold words are no title": "- **Drink** tea\n- Sleep",
    "lists of their own": "**Hot:**\n- **[[Tea**: 1]]\n\n**Cold:**\n- [[Milk\n- Beer]]",
    "four words in common": "[[This helps you sleep.]] [[Well, this helps you sleep.]]",
    "code in common": "[[```\nimport os as a or b\n```]] [[```\nimport os as a or b\n```]]",
    "sub-items": "1. [[Hot\n   - tea\n   - coffee]]\n2. [[Cold\n   - milk]]",
    "bullets under a number": "1. [[Hot\n- tea\n- coffee]]\n2. [[Cold\n- milk]]",
    "a list inside an item": "1. [[Hot\n1. tea\n2. coffee]]\n2. [[Cold]]",
    "a list of one chunk": "Hot:\n- [[tea\n- coffee]]\n\nCold:\n- [[milk\n- beer]]",
    "titles in the main text": "1. **Hot**\n   - [[tea]]\n2. **Cold**\n   - [[milk]]",
    "an item behind a sync": "1. [[Tea]]\n2. [[Milk]]\n3. <sync/>Both",
    "a list in code": "```\n- tea\n- **Milk:** cold\n```",
    "numbered headings": "## 1. Hot\n1. **Tea**: 1\n2. **Coffee**: 2\n## 2. Cold\n[[Milk]]",
}


@pytest.mark.parametrize("case", WITH_SEAMS)
def test_a_seam_is_named(case: str) -> None:
    names, answer = WITH_SEAMS[case]
    assert seams_of(answer) == names


@pytest.mark.parametrize("case", WITHOUT_SEAMS)
def test_what_only_looks_like_a_seam_is_none(case: str) -> None:
    assert seams_of(WITHOUT_SEAMS[case]) == []


def test_shared_lines_are_compared_by_their_words() -> None:
    chunks = ["- **Mix** the flour with salt.\nStir.", "1. Mix the flour with SALT\nStir."]
    assert shared_lines(chunks) == {"mix the flour with salt"}


# The number of items


def test_items_that_chunks_write_behind_their_own_count() -> None:
    answer = "- [[tea\n- milk\n- beer]]\n- [[milk\n- beer]]\n- [[beer]]"
    assert seams_of(answer, "Answer in three bullet points.") == ["outer_items", "item_count"]
    assert seams_of(answer, "Answer in six bullet points.") == ["outer_items"]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("1. [[Tea]]\n2. [[Milk]]", False),
        ("1. [[Tea]]\n\nAs I said:\n\n2. [[Milk]]\n3. [[Beer]]", True),
        ("[[Tea]] and [[milk]]", None),
        ("Hot:\n- tea\n- coffee\n- soup\n\nCold:\n- milk\n- beer", None),
    ],
)
def test_the_one_list_of_the_answer_counts(answer: str, verdict: bool | None) -> None:
    opening = '<promise topic="a" tokens="20"/><async>'
    tree = read(answer.replace("[[", opening).replace("]]", "</async>"))
    assert find_seams("Name two drinks.", tree).item_count is verdict
    assert find_seams(PROMPT, tree).item_count is None


@pytest.mark.parametrize(
    ("prompt", "limits"),
    [
        ("List exactly 8 countries in Africa, one bullet each.", (8, 8)),
        ("Which games do you know? Three bullets, please.", (3, 3)),
        ("A mail about the party, in three bullet points.", (3, 3)),
        ("Give me 3 to 5 tips.", (3, 5)),
        ("Write a list of hobbies, six entries or more.", (6, math.inf)),
        ("Make a list of five items at most.", (1, 5)),
        ("Give me a list of hobbies. Not more than three entries.", (1, 3)),
        ("Name at least five animals, as a list.", (5, math.inf)),
        ("I need six things for the beach, numbered from 1 to 6.", (6, 6)),
        ("Rank your top 5.", (5, 5)),
        ("I have three cats and two dogs. What do they eat?", None),
        ("I need six eggs. What for?", None),
        ("Give me two paragraphs on tea.", None),
        ("Write a list in 2.5 minutes.", None),
        ("Name three cities and list five sights.", None),
        ("Give three tips for each day.", None),
    ],
)
def test_only_a_request_for_one_number_of_items_counts(
    prompt: str, limits: tuple[int, float] | None
) -> None:
    assert requested_items(prompt) == limits
