"""Position schemes: an example by hand, and the property of each scheme."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.layout import (
    ChunkRun,
    Layout,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
    sees,
)
from pasta_decoding.lang.positions import SCHEMES, Scheme
from tests.law.world import ASYNC, CHUNK_AFTER_SYNC, CLOSE, END, OPEN, P20, P50, SYNC, answers

ANY_SCHEME = st.sampled_from(list(SCHEMES.values()))


def laid_out(segments: list[Segment], scheme: Scheme) -> Layout:
    return lay_out((60,), segments, scheme, async_close=CLOSE, end=END)


# Prompt and `a`; a promise on t, ASYNC x y; `b`; a promise without a topic, ASYNC z; SYNC, `c`.
BY_HAND = {
    "shared-max": [*(0, 1, 2, 3, 4), *(5, 6, 7), *(5, 6, 7), *(8, 9), *(10, 11)],
    "shared-sum": [*(0, 1, 2, 3, 4), *(5, 6, 7), *(5, 6, 7), *(8, 9), *(13, 14)],
    "reserve": [*(0, 1, 2, 3, 4), *(5, 6, 7), *(25, 26, 27), *(28, 29), *(78, 79)],
}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_positions_of_a_worked_example(name: str) -> None:
    segments: list[Segment] = [
        MainRun((11,)),
        PromiseRun((OPEN, 20, P20), 20),
        ChunkRun((ASYNC, 30, 31)),
        MainRun((12,)),
        PromiseRun((OPEN, P50), 50),
        ChunkRun((ASYNC, 40)),
        SyncRun(SYNC),
        MainRun((13,)),
    ]
    assert list(laid_out(segments, SCHEMES[name]).position) == BY_HAND[name]


@given(answers(), ANY_SCHEME)
def test_a_token_has_a_larger_position_than_all_that_it_sees(
    segments: list[Segment], scheme: Scheme
) -> None:
    layout = laid_out(segments, scheme)
    for row, position in enumerate(layout.position):
        assert all(layout.position[seen] < position for seen in seen_by(layout, row))


@given(answers())
def test_under_shared_sum_a_sync_stands_at_its_place_in_reading_order(
    segments: list[Segment],
) -> None:
    layout = laid_out(segments, SCHEMES["shared-sum"])
    syncs = [row for row, token in enumerate(layout.tokens) if token == SYNC]
    assert [layout.position[row] for row in syncs] == syncs


@given(answers())
def test_under_reserve_a_chunk_that_keeps_its_length_shares_no_position(
    segments: list[Segment],
) -> None:
    layout = laid_out(segments, SCHEMES["reserve"])
    assert len(set(layout.position)) == len(layout.position)


def test_under_reserve_a_sync_follows_a_chunk_that_outgrew_its_reserve() -> None:
    segments: list[Segment] = [
        PromiseRun((OPEN, P20), 20),
        ChunkRun((ASYNC, *range(30, 60))),
        SyncRun(SYNC),
    ]
    layout = laid_out(segments, SCHEMES["reserve"])
    assert layout.position[-2:] == (33, 34)


@given(answers(), ANY_SCHEME)
def test_a_consecutive_scheme_skips_no_position(segments: list[Segment], scheme: Scheme) -> None:
    """Each position is 1 + the largest that its token sees."""
    for tokens in (segments, CHUNK_AFTER_SYNC):
        layout = laid_out(tokens, scheme)
        largest = [
            max((layout.position[seen] for seen in seen_by(layout, row)), default=-1)
            for row in range(len(layout.position))
        ]
        is_consecutive = [position - 1 for position in layout.position] == largest
        assert is_consecutive or not scheme.consecutive
    assert is_consecutive == scheme.consecutive, "the last answer has a skip if any has"


def seen_by(layout: Layout, row: int) -> list[int]:
    return [other for other in range(row) if sees(layout, row, other)]
