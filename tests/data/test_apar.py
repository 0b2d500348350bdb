"""APAR's rules: what is forked and what is not; no character, topic or sync that was not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.annotate.apar import find_parts
from pasta_decoding.data.annotate.base import by_rule
from pasta_decoding.data.rows import Row
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Sync, read, show, strip
from tests.examples import few

PIECES = ["\n", "\n\n", " ", "1. ", "- ", "Tea: ", "**Tea:** ", "A. ", "<sync/>", "\\", "\x1c", "|"]
SENTENCES = [
    "Green tea is grown in the shade. ",
    "It is drunk hot by most people. ",
    "Mr. Li agrees.",
]
TEXT = st.lists(st.sampled_from([*PIECES, *SENTENCES]) | st.text(max_size=4), max_size=25)


def words(text: str) -> int:
    return len(text.split())


def annotate(response: str) -> str:
    [done] = by_rule(find_parts, words)([Row("1", "", "", response)])
    return done.row.response


def chunks(response: str) -> list[str]:
    return [node.text for node in read(annotate(response)) if isinstance(node, Chunk)]


@few(50)
@given(TEXT.map("".join))
def test_any_response_keeps_its_text_and_gets_neither_topics_nor_syncs(response: str) -> None:
    annotated = annotate(response)
    tree = read(annotated)
    assert strip(tree) == response
    assert show(tree) == annotated
    assert check(annotated, topic_required=False) == []
    assert Sync() not in tree
    found = [node for node in tree if isinstance(node, Chunk)]
    assert all(node.topic is None for node in found)
    assert not found or len(found) >= 3


LIST = """Three drinks:

1. **Tea**: Leaves in hot water. It keeps you awake.
2. Milk: From cows, goats
   and sheep.
   - Fresh milk: it turns sour within a week.
3. Water is the oldest of them. It has no taste.

All of them are wet. None of them is dry."""


def test_of_a_list_item_the_title_stays_or_else_the_first_sentence() -> None:
    assert chunks(LIST) == [
        "Leaves in hot water. It keeps you awake.",
        "From cows, goats\n   and sheep.\n   - Fresh milk: it turns sour within a week.",
        "It has no taste.",
    ]
    assert '1. **Tea**: <promise tokens="10"/><async>Leaves' in annotate(LIST)


PARAGRAPHS = """Tea came from China to Europe. Ships brought it in chests. They took a year.

Coffee came from Arabia instead. Dr. Li says that it came by land.

This paragraph has one sentence only.

Milk was always there. Nobody brought it."""


def test_of_a_paragraph_the_first_sentence_stays() -> None:
    assert chunks(PARAGRAPHS) == [
        "Ships brought it in chests. They took a year.",
        "Dr. Li says that it came by land.",
        "Nobody brought it.",
    ]


SEQUENTIAL = {
    "code": PARAGRAPHS + "\n\n```\ntea()\n```",
    "a rule": PARAGRAPHS.replace("\n\n", "\n\n---\n\n"),
    "a link": LIST.replace("no taste", "http://taste.example"),
    "two items": "- Tea: leaves in hot water\n- Milk: comes from cows and goats",
    "short items": "- Tea: hot\n- Milk: white\n- Water: wet",
    "one paragraph": PARAGRAPHS.replace("\n\n", " "),
}


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_what_the_rules_do_not_fork_stays_sequential(kind: str) -> None:
    assert chunks(SEQUENTIAL[kind]) == []
