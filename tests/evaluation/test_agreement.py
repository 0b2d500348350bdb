"""The measures of agreement: by hand, against themselves, and turned round."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.dataset import Row, is_held_out
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.agreement import (
    agreement,
    layout_rule,
    match,
    sync_places,
    units,
)
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, chunk_extents, read, strip


def word_ends(text: str) -> Sequence[int]:
    """A tokenizer whose tokens are words, with the white space before them."""
    return [found.end() for found in re.finditer(r"\s*\S+", text)]


def annotated(text: str) -> Tree:
    """`[...]` stands for a chunk, `|` for a sync."""
    text = text.replace("[", '<promise topic="t" tokens="10"/><async>').replace("]", "</async>")
    return read(text.replace("|", "<sync/>"))


GOLD = annotated("One two three. [Four five six.] [Seven eight nine.]\n|Ten eleven twelve.")
OTHER = annotated("One two three. [Four five six.] [Seven eight nine.\nTen eleven twelve.]|")


def test_every_measure_by_hand() -> None:
    # Chunks: 2 and 2, one in common. Units inside: 2 and 3, two in common. Of the twelve words
    # three are main here and chunk there. Syncs: behind nine words, and at the end.
    found = agreement([(GOLD, OTHER)], word_ends)
    assert found.exact_chunk_f1.value == 2 * 1 / (2 + 2)
    assert found.unit_f1.value == 2 * 2 / (2 + 3)
    assert found.token_agreement.value == 9 / 12
    assert found.sync_f1.value == 0
    # Gold: 3 words, promise (5), promise (5), chunk of 3 -> 16, sync, 3 words: 20 steps.
    assert found.ideal_speedup_gold.value == pytest.approx(12 / 20)
    # Other: 3, 5, 5, chunk of 6 -> 19, sync: 20 steps.
    assert found.ideal_speedup.value == pytest.approx(12 / 20)


def test_a_unit_is_inside_if_most_of_it_is_and_a_token_if_its_end_is() -> None:
    gold = annotated("[One two three four.]")
    most, less = annotated("One [two three four.]"), annotated("One two three [four.]")
    assert agreement([(gold, most)], word_ends).unit_f1.value == 1
    assert agreement([(gold, less)], word_ends).unit_f1.value == 0
    touching = annotated("x [one]two [three]")  # the second token is no word of ours
    ends = agreement([(read("x onetwo three"), touching)], lambda _text: [1, 2, 5, 8, 14])
    assert ends.token_agreement.value == 3 / 5


def test_rows_are_taken_together_and_speedups_are_geometric_means() -> None:
    same = annotated("[" + "word " * 40 + "end.] " + "word " * 40 + "end.")
    found = agreement([(GOLD, OTHER), (same, same)], word_ends)
    assert found.exact_chunk_f1.value == 2 * 2 / (4 + 2)
    assert found.token_agreement.value == (9 + 82) / (12 + 82)
    assert found.ideal_speedup.value == pytest.approx(sqrt(12 / 20 * 82 / 46))


def test_intervals_hold_the_value_and_are_the_same_every_time() -> None:
    pairs = [(GOLD, OTHER), (GOLD, GOLD)] * 10
    found = agreement(pairs, word_ends)
    figure = found.exact_chunk_f1
    assert figure.low is not None
    assert figure.value is not None
    assert figure.high is not None
    assert 0.5 < figure.low < figure.value == 0.75 < figure.high < 1
    assert agreement(pairs, word_ends) == found


def test_where_nothing_is_promised_there_is_no_f1() -> None:
    plain = read("One two three.")
    found = agreement([(plain, plain)], word_ends)
    nothing = (None, None, None)
    for figure in (found.exact_chunk_f1, found.unit_f1, found.sync_f1):
        assert (figure.value, figure.low, figure.high) == nothing
    assert found.token_agreement.value == found.ideal_speedup.value == 1


PIECE = st.sampled_from(
    ["One two three. ", "A b c d.\n", "[x y z] ", "[Four five six.]", "|", "\n"]
)
LAYOUTS = st.lists(PIECE, min_size=1, max_size=8).map("".join)


@given(LAYOUTS)
def test_an_annotation_agrees_with_itself(text: str) -> None:
    tree = annotated(text)
    found = agreement([(tree, tree)], word_ends)
    for figure in (found.exact_chunk_f1, found.unit_f1, found.token_agreement, found.sync_f1):
        assert figure.value in {1.0, None}
    assert found.ideal_speedup.value == found.ideal_speedup_gold.value


def test_it_does_not_matter_which_of_the_two_is_called_right() -> None:
    one, turned = agreement([(GOLD, OTHER)], word_ends), agreement([(OTHER, GOLD)], word_ends)
    assert one.exact_chunk_f1 == turned.exact_chunk_f1
    assert one.unit_f1 == turned.unit_f1
    assert one.token_agreement == turned.token_agreement
    assert one.sync_f1 == turned.sync_f1


def test_a_sync_is_at_the_same_place_on_either_side_of_white_space() -> None:
    assert sync_places(annotated("[a b]|\n\nc")) == sync_places(annotated("[a b]\n\n|c")) == {2}


def test_units_are_sentences_of_three_words_or_more() -> None:
    text = "# Title\n1. First of all.  Second one is here!\nYes.\n- Third\tone here"
    found = [text[start:end] for start, end in units(text)]
    assert found == ["1. First of all.", "Second one is here!", "- Third\tone here"]


LONG = "ten words that are long enough to be a chunk"
RULE = {
    "items": (f"Intro:\n\n1. {LONG}\n2. short\n3. {LONG}\n", [LONG, LONG]),
    "paragraphs": (f"{LONG}\n\n{LONG}.\n\n{LONG}!\n", [f"{LONG}.", f"{LONG}!"]),
    "two paragraphs": (f"{LONG}\n\n{LONG}", []),
    "nothing": ("", []),
}


@pytest.mark.parametrize("kind", RULE)
def test_the_layout_rule_takes_items_or_paragraphs_behind_the_first(kind: str) -> None:
    text, chunks = RULE[kind]
    tree: Tree = (Span(text),) if text else ()
    found = layout_rule(tree)
    assert [node.text for node in found if isinstance(node, Chunk)] == chunks
    assert strip(found) == text
    assert [text[start:end] for start, end in chunk_extents(found)] == chunks


def test_a_quarter_is_held_out_whatever_the_order() -> None:
    held = [str(n) for n in range(4000) if is_held_out(str(n))]
    assert 900 < len(held) < 1100
    assert is_held_out("dolly3k-2763")


def row(name: str, response: str) -> Row:
    return Row(name, "", "", response)


def test_rows_are_matched_by_id_and_must_be_of_one_response() -> None:
    gold = [row("a", "One"), row("b", "<b>"), row("c", "Three")]
    assert match(gold, [row("c", "Three"), row("b", "<b>")]) == [
        (read("<b>"), read("<b>")),
        (read("Three"), read("Three")),
    ]
    with pytest.raises(PastaError, match="the annotations of 'a' are not of the same response"):
        match(gold, [row("a", "One ")])
    with pytest.raises(PastaError, match="no row is in both files"):
        match(gold, [row("d", "Four")])


def test_extents_count_characters_of_the_plain_text() -> None:
    nodes: list[Node] = [Span("a<sync/>"), Chunk("t", 10, "bc"), Sync(), Chunk("u", 10, "d")]
    assert chunk_extents(tuple(nodes)) == [(8, 10), (10, 11)]
