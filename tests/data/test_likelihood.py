"""The annotator `likelihood` on a random model: what it may do, and what its nats are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.annotate.draft import LENGTHS
from pasta_decoding.data.annotate.likelihood import Likelihood
from pasta_decoding.data.annotate.limits import Limits
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Sync, read, strip
from tests.data.reader import tiny_reader
from tests.examples import few

TIPS = """Here are some tips for a good night:

1. Keep a regular schedule, and go to bed at the same hour on every day of the week.
2. Avoid coffee and strong tea in the late afternoon, since both keep you awake for hours.
3. Make the bedroom dark, cool and quiet, and leave the telephone in another room.

With these habits most people sleep better within two weeks of trying them out in earnest."""

WORDS = st.sampled_from(
    [
        "Rain",
        "falls.",
        "The",
        "sea",
        "is",
        "wide.",
        "1.",
        "\n",
        "\n\n",
        "- ",
        "#",
        "```\n",
        "<sync/>",
    ]
)


def row(response: str) -> Row:
    return Row("1", "test", "Say something.", response)


def annotate(response: str, limits: Limits) -> tuple[str, dict[str, float]]:
    (done,) = Likelihood(tiny_reader(), limits).annotate([row(response)])
    assert done.rejected is None
    return done.row.response, dict(done.cost)


EAGER = Limits(max_nats=1e9, sync_nats=1e9, probability=0.0)


def test_parts_of_a_list_are_promised_and_the_text_stays_as_it_is() -> None:
    text, cost = annotate(TIPS, EAGER)
    chunks = [node for node in read(text) if isinstance(node, Chunk)]
    assert strip(read(text)) == TIPS
    assert check(text) == []
    assert len(chunks) >= 3
    assert len({chunk.topic for chunk in chunks}) == len(chunks)
    assert cost["plain_tokens"] < cost["model_tokens"] <= LENGTHS * cost["plain_tokens"]
    assert cost["prompt_tokens"] % len("Say something.\n") == 0


@few(25)
@given(st.lists(WORDS, max_size=120).map(" ".join))
def test_whatever_the_response_it_stays_and_costs_three_lengths_at_most(response: str) -> None:
    text, cost = annotate(response, EAGER)
    assert strip(read(text)) == response
    assert check(text) == []
    assert cost["model_tokens"] <= LENGTHS * cost["plain_tokens"]


def test_a_chunk_that_costs_too_much_to_hide_stays_in_the_main_thread() -> None:
    text, _ = annotate(TIPS, replace(EAGER, max_nats=-1e9))
    assert text == TIPS


def test_main_text_that_loses_too_much_waits() -> None:
    text, _ = annotate(TIPS, replace(EAGER, probability=0.2, sync_nats=-1e9))
    tree = read(text)
    if any(isinstance(node, Chunk) for node in tree) and not isinstance(tree[-1], Chunk):
        assert any(isinstance(node, Sync) for node in tree)
    assert check(text) == []


def test_what_is_read_within_a_row_is_heard_before_the_first_row_is_done() -> None:
    heard: list[float] = []
    annotator = Likelihood(tiny_reader(), EAGER, together=3, part=heard.append)
    rows = annotator.annotate([replace(row(TIPS), id=str(n)) for n in range(3)])
    next(rows)
    # Three rows, three readings each: in order, under several topics, as annotated.
    assert heard == [1 / 3] * 9
    assert len(list(rows)) == 2


def test_rows_read_together_are_annotated_as_they_are_alone() -> None:
    rows = [replace(row(TIPS[n:]), id=str(n)) for n in (0, 40, 140)]
    together = list(Likelihood(tiny_reader(), EAGER, together=3).annotate(rows))
    alone = list(Likelihood(tiny_reader(), EAGER, together=1).annotate(rows))
    assert [one.row for one in together] == [one.row for one in alone]
    assert [one.cost for one in together] == [one.cost for one in alone]
