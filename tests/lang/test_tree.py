"""The tree's laws: print then read is the identity, and strip returns all text.

In a normal tree no span is empty or next to another, every sync joins a chunk, and topics and
lengths are valid. Reading gives normal trees only.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.tags import ATTEMPT, DEFAULT_TOKENS, Text, parse
from pasta_decoding.lang.tree import (
    MAX_TOKENS,
    Chunk,
    Node,
    Span,
    Sync,
    Tree,
    in_text_form,
    read,
    strip,
    text_form,
    valid_tokens,
    valid_topic,
)

TAGS = [
    '<promise topic="a" tokens="20"/>',
    '<promise topic="a  b c d" tokens="7"/>',
    "<promise >",
    "<async>",
    "</async>",
    "<sync/>",
]
PIECES = st.sampled_from(
    [*TAGS, f"{TAGS[0]}<async>", f"{TAGS[1]} <async>b", " ", "\\", "<as", "ync>", "<promise "]
)
SOURCE = st.lists(PIECES | st.text('ab <>/"\\\n', max_size=5)).map("".join)
TEXT = SOURCE.filter(bool)
TOPIC = st.none() | st.text(max_size=300).map(valid_topic)
TOKENS = st.integers(-5, 10**9).map(valid_tokens)


def normal(nodes: list[Node]) -> Tree:
    """Return `nodes` without syncs that join no chunk and without spans next to another."""
    out: list[Node] = []
    unjoined = False
    for node in nodes:
        if isinstance(node, Sync) and not unjoined:
            continue
        if isinstance(node, Span) and out and isinstance(out[-1], Span):
            continue
        unjoined = isinstance(node, Chunk) or (unjoined and not isinstance(node, Sync))
        out.append(node)
    return tuple(out)


TREES = st.lists(
    st.builds(Span, TEXT) | st.builds(Chunk, TOPIC, TOKENS, SOURCE) | st.just(Sync())
).map(normal)


@given(TREES)
def test_what_was_printed_reads_as_the_same_tree_and_strips_to_its_texts(tree: Tree) -> None:
    source = text_form(tree)
    assert read(source) == tree
    texts = [node.text for node in tree if not isinstance(node, Sync)]
    assert strip(read(source)) == "".join(texts)
    chunks = any(isinstance(node, Chunk) for node in tree)
    literal = any(isinstance(node, Span) and ATTEMPT.search(node.text) for node in tree)
    assert in_text_form(source) or not (chunks or literal)


@pytest.mark.parametrize("text", ["", "Plain.", "A stray <sync/> or </async>.", "C:\\\\<sync/>"])
def test_plain_text_is_not_taken_for_a_text_form(text: str) -> None:
    assert not in_text_form(text)


@given(SOURCE | st.text())
def test_reading_any_text_gives_a_normal_tree(source: str) -> None:
    tree = read(source)
    assert normal(list(tree)) == tree
    assert Span("") not in tree
    assert read(text_form(tree)) == tree
    texts = [event.text for event in parse(source) if isinstance(event, Text)]
    assert strip(tree) == "".join(texts), "no text is lost"


@given(st.text(max_size=300))
def test_a_valid_topic_stays_as_it_is_and_can_be_printed(text: str) -> None:
    topic = valid_topic(text)
    assert valid_topic(topic) == topic
    assert read(text_form((Chunk(topic, MAX_TOKENS, "x"),))) == (Chunk(topic, MAX_TOKENS, "x"),)


@pytest.mark.parametrize(
    ("written", "topic"),
    [
        (None, None),
        ("", None),
        (' "<>\\" ', None),
        ("diet", "diet"),
        (" what\n to  eat today", "what to eat"),
        ('say "hi\\"', "say hi"),
        ("x" * 201, "x" * 200),
        (f"{'x' * 199} y", "x" * 199),
    ],
)
def test_a_topic_is_made_valid(written: str | None, topic: str | None) -> None:
    assert valid_topic(written) == topic


@pytest.mark.parametrize(
    ("written", "tokens"),
    [(None, 50), (0, 50), (-3, 50), (1, 10), (10, 10), (11, 20), (100_001, 100_000)],
)
def test_a_length_is_made_valid(written: int | None, tokens: int) -> None:
    assert DEFAULT_TOKENS == 50
    assert valid_tokens(written) == tokens
