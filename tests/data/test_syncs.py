"""Whether text behind a sync names or uses what it joined, worked by hand."""

from __future__ import annotations

import pytest

from pasta_decoding.data.syncs import content, text_behind_sync, uses_parts
from pasta_decoding.lang.tree import read

PART = '<promise topic="train fares" tokens="10"/><async>The railway takes 45 dollars.</async>'


def test_content_is_numbers_and_longer_words_that_say_something() -> None:
    assert content("There are 3.5 Trains, two of which cost 1,000 more") == {
        "3.5", "train", "cost", "1,000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("behind", "used"),
    [
        ("So take the train.", True),  # names its topic
        ("So the railway costs 45 in all.", True),  # a word and a number of its text
        ("So it is 45.", False),  # one of them may be chance
        ("That is all there is to say.", False),
        ("", False),
        ("4 dollars", False),  # the main text has the word, and 4 is not 45
    ],
)
def test_a_part_is_used_by_its_topic_its_words_or_its_numbers(behind: str, used: bool) -> None:
    assert uses_parts(read(f"In dollars: {PART}<sync/>{behind}")) == used


def test_what_the_prompt_says_can_be_known_without_the_part() -> None:
    tree = read(f"{PART}<sync/>Railways want 45.")
    assert uses_parts(tree)
    assert not uses_parts(tree, "What of the railway?")


def test_text_before_a_sync_or_without_one_uses_nothing() -> None:
    assert not uses_parts(read(f"{PART} So take the train."))
    assert not uses_parts(read(f"{PART} So take the train, 45.<sync/> Bye."))


def test_a_chunk_behind_the_sync_sees_what_it_joined() -> None:
    later = PART.replace("The railway takes 45 dollars.", "Of the 45 dollars, save 5.")
    assert uses_parts(read(f"{PART}<sync/>{later.replace('train fares', 'saving')}"))


def test_each_sync_is_looked_at_and_the_text_behind_the_first_is_told() -> None:
    second = '<promise topic="bus" tokens="10"/><async>Cheap.</async>'
    tree = read(f"{PART}<sync/>Well.{second}<sync/>The bus.")
    assert uses_parts(tree)
    assert text_behind_sync(tree) == "Well.Cheap.The bus."
    assert text_behind_sync(read(PART)) == ""
