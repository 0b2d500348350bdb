"""Missing topics and text quality; the other measures are tested where they are used."""

from __future__ import annotations

import pytest

from pasta_decoding.lang.measures import missing_topics, text_quality
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
    assert missing_topics(read(chunk(topic, text))) == missing


def test_every_chunk_is_asked_for_its_own_topic() -> None:
    both = chunk("diet", "Sleep well.") + " " + chunk("sleep", "Sleep well.")
    assert missing_topics(read(both)) == 1


def test_repetition_costs_a_text_more_than_it_saves() -> None:
    assert text_quality(2.0, 0.0) == -2
    assert text_quality(1.0, 0.5) == -3
