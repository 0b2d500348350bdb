"""Rule annotation: nothing is lost whatever the text; layout decides what becomes a chunk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.annotate import apar, structure
from pasta_decoding.data.annotate.base import by_rule
from pasta_decoding.data.rows import Row
from pasta_decoding.lang.check import check, warn
from pasta_decoding.lang.tree import Chunk, Sync, read, strip, text_form

FOLDER = Path(__file__).parent / "texts"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
PLAIN = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("plain/*.md"))}
RULES = {"structure": structure.find_parts, "apar": apar.find_parts}
# Pieces that steer layout, sentences long enough to become chunks, and what must be escaped.
BREAKS = ["\n", "\n\n", " ", "    ", "\t", "\r\n", "\x0b", "\u2028", "\xa0", "\x1c"]
MARKERS = ["1. ", "a) ", "- ", "# ", "**", "__", "Tips:", "```", "|", "Step 1: ", "Overall, "]
TAGS = ["\\", '"', "<async>", "</async>", "<sync/>", '<promise topic="a" tokens="10"/>']
LAYOUT = st.sampled_from([*BREAKS, *MARKERS, *TAGS])
SENTENCE = st.sampled_from(
    [
        "Fresh fruit keeps the body supplied with vitamins through most of a long winter. ",
        "**Daily walks**: A short walk after each meal steadies the blood sugar of most adults. ",
        "This also helps many people to sleep through the night without waking up too early. ",
        "Warm milk before bed is an old remedy that calms children, and their parents too. ",
    ]
)
TEXT = st.lists(LAYOUT | SENTENCE | st.text(max_size=4), max_size=25).map("".join)


def annotate(response: str, rule: str = "structure") -> str:
    [done] = by_rule(RULES[rule], lambda text: len(text.split()), [Row("1", "", "", response)])
    return done.row.response


def chunks(response: str, rule: str = "structure") -> list[Chunk]:
    return [node for node in read(annotate(response, rule)) if isinstance(node, Chunk)]


@pytest.mark.parametrize("rule", RULES)
@given(response=TEXT | st.text(alphabet=st.characters(exclude_categories=[]), max_size=200))
def test_the_text_stays_and_the_checker_finds_nothing_wrong(rule: str, response: str) -> None:
    annotated = annotate(response, rule)
    tree = read(annotated)
    assert strip(tree) == response
    assert text_form(tree) == annotated
    assert check(annotated, topic_required=rule == "structure") == []
    assert warn(annotated) == []
    assert Sync() not in tree
    topics = [chunk.topic for chunk in tree if isinstance(chunk, Chunk)]
    if rule == "apar":
        assert len(topics) not in (1, 2)
        assert set(topics) <= {None}
    else:
        assert len(topics) != 1
        assert len(set(topics)) == len(topics)


# structure


def topics(response: str) -> list[str | None]:
    return [chunk.topic for chunk in chunks(response)]


def test_list_items_are_chunks_and_their_markers_main_text() -> None:
    response = TEXTS["list"]
    annotated = annotate(response)
    assert annotated.startswith(
        "Healthy habits pay off over the years:\n\n"
        '1. **<promise topic="balanced diet" tokens="20"/><async>Balanced diet**: Eat'
    )
    assert annotated.endswith("kitchen.</async>\n\nIn conclusion, small steps add up.")
    assert topics(response) == ["balanced diet", "regular exercise", "enough sleep"]


def test_sections_are_chunks_and_their_headings_main_text() -> None:
    response = TEXTS["sections"]
    assert topics(response) == ["ancient city", "baroque churches"]
    assert "## Ancient city\n\n<promise" in annotate(response)


def test_paragraphs_behind_the_opening_are_chunks_and_a_generic_closing_is_not() -> None:
    assert [chunk.text.split()[0] for chunk in chunks(TEXTS["bees"])] == ["Honey", "Bumble"]


def test_a_sentence_that_leans_on_the_one_before_stays_with_it() -> None:
    assert [chunk.text.split()[0] for chunk in chunks(TEXTS["malaria"])] == [
        "Mosquitoes",
        "Doctors",
    ]


@pytest.mark.parametrize("response", PLAIN.values(), ids=PLAIN)
def test_what_hangs_together_stays_plain(response: str) -> None:
    assert annotate(response) == response


# apar

DRINKS, PARAGRAPHS = TEXTS["drinks"], TEXTS["paragraphs"]


def test_of_a_list_item_the_title_stays_and_else_the_first_sentence() -> None:
    assert [chunk.text for chunk in chunks(DRINKS, "apar")] == [
        "Leaves in hot water. It keeps you awake.",
        "From cows, goats\n   and sheep.\n   - Fresh milk: it turns sour within a week.",
        "It has no taste.",
    ]
    assert '1. **Tea**: <promise tokens="10"/><async>Leaves' in annotate(DRINKS, "apar")
    assert [chunk.text for chunk in chunks(PARAGRAPHS, "apar")] == [
        "Ships brought it in chests. They took a year.",
        "Dr. Li says that it came by land.",
        "Nobody brought it.",
    ]


UNFORKED = {
    "code": PARAGRAPHS + "\n\n```\ntea()\n```",
    "a rule": PARAGRAPHS.replace("\n\n", "\n\n---\n\n"),
    "a link": DRINKS.replace("no taste", "http://taste.example"),
    "two items": "- Tea: leaves in hot water\n- Milk: comes from cows and goats",
    "short items": "- Tea: hot\n- Milk: white\n- Water: wet",
    "one paragraph": PARAGRAPHS.replace("\n\n", " "),
}


@pytest.mark.parametrize("kind", UNFORKED)
def test_what_apars_rules_do_not_fork_stays_sequential(kind: str) -> None:
    assert chunks(UNFORKED[kind], "apar") == []
