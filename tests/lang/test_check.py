"""The checker's law: texts pass if and only if they are the text form of neat chunks."""

from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Tree, read, text_form

PROMISE = '<promise topic="a" tokens="20"/>'

# Complete chunks, neat or with one flaw: many drawn texts pass, and many have one problem.
PIECES = [
    f"{PROMISE}<async>b c</async>",
    f"{PROMISE}<async>b</async><sync/>",
    f"{PROMISE}<async></async>",
    f"{PROMISE}<async>b </async>",
    f"{PROMISE}<async> b</async>",
    f"{PROMISE} <async>b</async>",
    f"{PROMISE}<async>b<sync/></async>",
    f"{PROMISE}<async>",
    '<promise tokens="20"/><async>b</async>',
    '<promise tokens="25" topic="a"><async> b</async>',
    PROMISE,
    "<async>",
    "</async>",
    "<sync/>",
    "\\",
    "\n",
    "text",
    '<promise tokens="20" topic="a"/><async>b</async>',
]
TEXT = st.text('ab <>/"\\\n', max_size=4) | st.text(max_size=2)
SOURCE = st.lists(st.sampled_from(PIECES) | TEXT, max_size=6).map("".join)


def neat(tree: Tree, *, topic_required: bool) -> bool:
    return all(
        node.text and node.text == node.text.strip() and (node.topic or not topic_required)
        for node in tree
        if isinstance(node, Chunk)
    )


@given(SOURCE, st.booleans())
def test_a_text_passes_exactly_if_it_prints_as_itself_with_neat_chunks(
    source: str, topic_required: bool
) -> None:
    tree = read(source)
    expected = text_form(tree) == source and neat(tree, topic_required=topic_required)
    assert (not check(source, topic_required=topic_required)) == expected
