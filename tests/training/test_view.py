"""From a response to tensors: what is encoded, what is cut, what is packed, what is predicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    Layout,
    PromiseRun,
    Run,
    Segment,
    SyncRun,
    lay_out,
)
from pasta_decoding.lang.tree import read
from pasta_decoding.training.view import (
    compile_answer,
    crop,
    pack,
    packed_batch,
    segments_of,
    visibility,
)
from tests.law.world import ASYNC, CLOSE, CONTROL, END, OPEN, P20, P50, SCHEME, SYNC, answers


def encode(text: str) -> list[int]:
    """One token a character, so that by hand `a` is 97."""
    return [ord(character) for character in text]


def size(segment: Segment) -> int:
    return 1 if isinstance(segment, SyncRun) else len(segment.ids)


def layout_of(tokens: int) -> Layout:
    """An answer of this many tokens, all of them prompt."""
    return lay_out(range(tokens), [], SCHEME, async_close=CLOSE, end=None)


RESPONSE = 'ab<promise topic="c d" tokens="20"/><async>ef</async><sync/>g'
SEGMENTS: list[Segment] = [
    Run((97, 98)),
    PromiseRun((OPEN, 99, 32, 100, P20), 20),
    ChunkRun((ASYNC, 101, 102)),
    SyncRun(SYNC),
    Run((103,)),
]


def test_every_part_of_a_response_is_encoded_by_itself() -> None:
    assert segments_of(read(RESPONSE), CONTROL, encode) == SEGMENTS


@pytest.mark.parametrize(
    ("tokens", "bucket", "close"), [(20, 20, P20), (21, 50, P50), (90, 50, P50)]
)
def test_a_promise_says_the_next_larger_length_of_its_chunk_in_these_tokens(
    tokens: int, bucket: int, close: int
) -> None:
    tree = read(f'<promise topic="a" tokens="20"/><async>{"b" * tokens}</async>')
    promise = segments_of(tree, CONTROL, encode)[0]
    assert promise == PromiseRun((OPEN, 97, close), bucket)


def test_a_promise_without_a_topic_has_nothing_between_its_tokens() -> None:
    tree = read('<promise tokens="20"/><async>b</async>')
    assert segments_of(tree, CONTROL, encode)[0] == PromiseRun((OPEN, P20), 20)


@given(answers(), st.integers(0, 40))
def test_crop_keeps_whole_segments_that_fit_and_never_a_promise_without_its_chunk(
    segments: list[Segment], limit: int
) -> None:
    kept, whole = crop(segments, limit)
    assert kept == segments[: len(kept)]
    assert whole == (len(kept) == len(segments))
    assert sum(map(size, kept)) <= limit
    assert not kept or not isinstance(kept[-1], PromiseRun)
    rest = segments[len(kept) :]
    unit = rest[:2] if rest and isinstance(rest[0], PromiseRun) else rest[:1]
    assert whole or sum(map(size, kept + unit)) > limit, "as much as fits"


@pytest.mark.parametrize(("limit", "kept"), [(1, 0), (2, 1), (9, 1), (10, 3), (11, 4), (12, 5)])
def test_crop_by_hand(limit: int, kept: int) -> None:
    assert crop(SEGMENTS, limit) == (SEGMENTS[:kept], kept == 5)


def compiled(max_tokens: int, *joinings: Joining) -> list[Layout]:
    return compile_answer(
        (80, 81),
        read(RESPONSE),
        control=CONTROL,
        encode=encode,
        scheme=SCHEME,
        end=END,
        max_tokens=max_tokens,
        joinings=joinings or (Joining.kv,),
    )


def test_the_end_is_taught_only_where_the_answer_is_whole() -> None:
    [whole], [cut] = compiled(14), compiled(13)
    assert whole.label[-1] == END
    assert cut.tokens == whole.tokens[:-1]
    assert cut.label[-1] is None


def test_rows_of_the_text_join_are_added_where_they_differ() -> None:
    """The answer has one sync. Up to there, its first row and the `kv` layout are the same."""
    [kv], [first, second] = compiled(99), compiled(99, Joining.text)
    assert compiled(99, Joining.text, Joining.kv) == [kv, second]
    assert kv.tokens[: len(first.tokens)] == first.tokens
    both = [label for label in (*first.label, *second.label) if label is not None]
    assert both == [label for label in kv.label if label is not None]


def test_a_copy_is_one_causal_sequence_and_teaches_nothing() -> None:
    _, second = compiled(99, Joining.text)
    copied = second.tokens.index(SYNC)
    assert second.tokens.count(CLOSE) == 1
    assert second.position == tuple(range(len(second.tokens)))
    assert second.label[:copied] == (None,) * copied
    assert second.label[copied] == second.tokens[copied + 1]
    size = len(second.tokens)
    assert visibility(packed_batch([second])).equal(torch.ones(size, size, dtype=torch.bool).tril())


def test_a_row_without_anything_behind_its_copy_is_left_out() -> None:
    [kv] = compiled(13)
    assert kv.tokens[-1] == SYNC
    [first] = compiled(13, Joining.text)
    assert SYNC not in first.tokens
    assert first.label[-1] is not None
    assert compiled(13, Joining.text, Joining.kv) == [kv]


@pytest.mark.parametrize("max_tokens", [0, 2, 3])
def test_an_answer_of_which_nothing_fits_is_left_out(max_tokens: int) -> None:
    assert compiled(max_tokens) == []


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 20))
def test_packs_keep_the_order_and_the_limit_and_waste_no_room(sizes: list[int], limit: int) -> None:
    layouts = [layout_of(tokens) for tokens in sizes]
    packs = pack(layouts, limit)
    assert [layout for layouts in packs for layout in layouts] == layouts
    filled = [sum(len(layout.tokens) for layout in layouts) for layouts in packs]
    for layouts_of_pack, tokens in zip(packs, filled, strict=True):
        assert tokens <= limit or len(layouts_of_pack) == 1, "a longer answer is alone"
    for tokens, following in zip(filled, packs[1:], strict=False):
        assert tokens + len(following[0].tokens) > limit


FIRST = lay_out(
    (90, 91), [Run((11,)), *SEGMENTS[1:4], Run((12,))], SCHEME, async_close=CLOSE, end=END
)
SECOND = lay_out((92,), [Run((13, 14))], SCHEME, async_close=CLOSE, end=None)


def test_a_pack_by_hand() -> None:
    found = packed_batch([FIRST, SECOND])
    answer = [90, 91, 11, OPEN, 99, 32, 100, P20, ASYNC, 101, 102, SYNC, 12]
    assert found.tokens_T.tolist() == [*answer, 92, 13, 14]
    # The chunk starts where the main thread goes on; the sync follows the chunk's last token.
    assert found.position_T.tolist() == [*range(8), 8, 9, 10, 11, 12, 0, 1, 2]
    assert found.document_T.tolist() == [0] * 13 + [1] * 3
    assert found.thread_T.tolist() == [0] * 8 + [1] * 3 + [0] * 5
    assert found.visible_until_T.tolist() == [*range(8), 7, 7, 7, 8, 9, 0, 1, 2]
    assert found.visible_from_T.tolist() == [*range(8), 8, 8, 8, 8, 9, 0, 1, 2]


def test_labels_by_hand() -> None:
    found = packed_batch([FIRST, SECOND])
    pairs = dict(zip(found.source_L.tolist(), found.label_L.tolist(), strict=True))
    main = {1: 11, 2: OPEN, 3: 99, 4: 32, 5: 100, 6: P20, 7: SYNC, 11: 12, 12: END}
    chunk = {8: 101, 9: 102, 10: CLOSE}
    cut_off = {13: 13, 14: 14}
    assert pairs == main | chunk | cut_off


def test_answers_of_a_pack_do_not_see_each_other() -> None:
    segments: list[Segment] = [
        PromiseRun((OPEN, P20), 20),
        ChunkRun((ASYNC,)),
        Run((11,)),
        SyncRun(SYNC),
    ]
    answer = lay_out((90,), segments, SCHEME, async_close=CLOSE, end=END)
    # prompt, promise, closing, chunk, main beside the chunk, sync; then a short second answer
    expected = [
        "1.......",
        "11......",
        "111.....",
        "1111....",
        "111.1...",
        "111111..",
        "......1.",
        "......11",
    ]
    found = visibility(packed_batch([answer, layout_of(2)]))
    assert ["".join(".1"[int(cell)] for cell in row) for row in found] == expected
