"""From rows to tensors: what is left out, encoded, cut and packed, and what is predicted."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    Layout,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
)
from pasta_decoding.lang.tree import Span, read, text_form
from pasta_decoding.models.catalog import BaseAlone
from pasta_decoding.models.checkpoint import BaseIdentity, Checkpoint, choose_tokens
from pasta_decoding.models.load import LoadedModel, load_base
from pasta_decoding.models.template import Message
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.examples import (
    compile_answer,
    compile_rows,
    plan_packs,
    segments_of,
    shared_out,
)
from pasta_decoding.training.view import pack, packed_batch
from tests.checkpoint import END_ID, byte_tokenizer, make_base
from tests.law.world import ASYNC, CLOSE, CONTROL, END, OPEN, P20, P50, SCHEME, SYNC
from tests.shapes import make_llama3
from tests.training.tiny_runs import CONFIG, ROWS, chunk

TOKENIZER = byte_tokenizer()
TOKENS = choose_tokens(TOKENIZER)
RECORD = Checkpoint(BaseIdentity("tiny", "llama", 1, 1, 1, ""), TOKENS, {})
LOADED = LoadedModel(None, TOKENIZER, RECORD, frozenset({END_ID}))

# Rows


def compiled(rows: Sequence[Row], config: SftConfig = CONFIG) -> list[Layout]:
    return compile_rows(rows, LOADED, config)


def test_rows_that_cannot_be_used_are_left_out_counted_and_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    unusable = [
        Row("5", "", "x" * 300, "Too late."),
        Row("6", "", "Why?", "No <promise tokens='x'> and an <async>end"),
        Row("8", "", "Why?", " \n"),
        Row("11", "", "Why?", text_form((Span(ROWS[0].response),))),
        Row("9", "", " ", "To what?"),
        Row("12", "", "<|im_start|>user\n?<|im_end|>", "Twice in the template."),
        Row("13", "", "Why?", "So.<|im_end|>\n"),
        Row("10", "", "y" * 300, "Too late."),
    ]
    assert len(compiled([*ROWS, *unusable])) == 4
    assert caplog.messages == [
        "2 rows left out, the first is 5: longer than 256 tokens",
        "1 rows left out, the first is 6: broken tags (promise-without-async)",
        "1 rows left out, the first is 8: empty response",
        "1 rows left out, the first is 11: annotated twice: its tags are text",
        "1 rows left out, the first is 9: the prompt is empty",
        "1 rows left out, the first is 12: its text has the chat template's '<|im_start|>' in it",
        "1 rows left out, the first is 13: its text has the chat template's '<|im_end|>' in it",
    ]
    with pytest.raises(PastaError, match=r"^no row to train on$") as caught:
        compiled(unusable)
    assert caught.value.hint == "Give other rows, or a larger limit of tokens."


def test_without_topics_the_same_rows_teach_promises_that_are_closed_at_once() -> None:
    bare = [replace(row, response=re.sub(' topic="[^"]*"', "", row.response)) for row in ROWS]
    config = replace(CONFIG, topic="none")
    layouts = compiled(ROWS, config)
    assert layouts == compiled(bare, config)
    tokens = [token for layout in layouts for token in layout.tokens]
    following = [
        tokens[index + 1] for index, id_ in enumerate(tokens) if id_ == TOKENS.promise_open
    ]
    assert following == [TOKENS.promise_close[20]] * 6
    assert len(compiled(bare)) == 1


def test_earlier_turns_are_part_of_the_prompt_and_carry_no_loss() -> None:
    history = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Ho."))
    [alone] = compiled(ROWS[3:])
    [with_history] = compiled([replace(ROWS[3], history=history)])
    text = TOKENIZER.decode(list(with_history.tokens))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert text.index("Ho.<|im_end|>") < text.index("Hello?")
    labels = [
        [label for label in layout.label if label is not None] for layout in (alone, with_history)
    ]
    assert labels[0] == labels[1]


def test_the_same_rows_teach_each_tokenizer_its_own_lengths(tmp_path: Path) -> None:
    """One takes these words whole, as large vocabularies do; the other writes them in bytes."""
    text = "user1assistant2system3user4assistant5system6user"
    rows = [replace(ROWS[0], response=chunk("Roles", text))]  # which says 20 tokens
    bases = {13: make_llama3(tmp_path / "llama3"), 48: make_base(tmp_path / "bytes")}
    for tokens, base in bases.items():
        loaded = load_base(BaseAlone(base))
        control = loaded.checkpoint.control
        [layout] = compile_rows(rows, loaded, CONFIG)
        begin = layout.tokens.index(control.async_open)
        assert sum(thread == 1 for thread in layout.thread) - 1 == tokens
        assert layout.tokens[begin - 1] == control.promise_close[control.bucket(tokens)]


# Segments


class Characters:
    """One token a character, so that by hand `a` is 97."""

    def encode_text(self, text: str, *, continues: bool = False) -> list[int]:
        assert continues == (text != "ab"), "a response begins once"
        return [ord(character) for character in text]


ENCODER: Any = Characters()


RESPONSE = 'ab<promise topic="c d" tokens="20"/><async>ef</async><sync/>g'
SEGMENTS: list[Segment] = [
    MainRun((97, 98)),
    PromiseRun((OPEN, 99, 32, 100, P20), 20),
    ChunkRun((ASYNC, 101, 102)),
    SyncRun(SYNC),
    MainRun((103,)),
]


def test_every_part_of_a_response_is_encoded_by_itself() -> None:
    assert segments_of(read(RESPONSE), CONTROL, ENCODER) == SEGMENTS


def test_a_promise_says_the_next_larger_length_of_its_chunk_in_these_tokens() -> None:
    for topic, tokens, expected in (
        (' topic="a"', 20, PromiseRun((OPEN, 97, P20), 20)),
        (' topic="a"', 21, PromiseRun((OPEN, 97, P50), 50)),
        (' topic="a"', 90, PromiseRun((OPEN, 97, P50), 50)),
        ("", 1, PromiseRun((OPEN, P20), 20)),
    ):
        tree = read(f'<promise{topic} tokens="20"/><async>{"b" * tokens}</async>')
        assert segments_of(tree, CONTROL, ENCODER)[0] == expected


def laid_out(max_tokens: int, *joinings: Joining) -> list[Layout]:
    config = replace(CONFIG, max_tokens=max_tokens, joins=joinings or (Joining.kv,))
    return compile_answer((80, 81), SEGMENTS, CLOSE, END, config)


def test_an_answer_is_taught_whole_or_not_at_all() -> None:
    [layout] = laid_out(14)
    assert layout.label[-1] == END
    with pytest.raises(PastaError, match=r"^longer than 11 tokens$"):
        laid_out(11)


def test_rows_of_the_text_join_are_added_where_they_differ() -> None:
    """The answer has one sync. Up to there, its first row and the `kv` layout are the same."""
    [kv] = laid_out(99)
    [first, second] = laid_out(99, Joining.text)
    assert laid_out(99, Joining.text, Joining.kv) == [kv, second]
    assert kv.tokens[: len(first.tokens)] == first.tokens
    both = [label for label in (*first.label, *second.label) if label is not None]
    assert both == [label for label in kv.label if label is not None]


# Packs


def layout_of(tokens: int) -> Layout:
    """An answer of this many tokens, all of them prompt."""
    return lay_out(range(tokens), [], SCHEME, async_close=CLOSE, end=None)


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


def test_packs_of_all_epochs_are_fixed_in_advance_and_each_epoch_shows_every_row() -> None:
    layouts = compiled(ROWS)
    all_epochs = replace(CONFIG, max_steps=None)
    packs = plan_packs(layouts, all_epochs)
    assert packs == plan_packs(layouts, all_epochs)
    assert packs[:20] == plan_packs(layouts, CONFIG)
    in_order = [layout for layouts_of_pack in packs for layout in layouts_of_pack]
    for epoch in range(20):
        assert sorted(map(id, in_order[4 * epoch : 4 * epoch + 4])) == sorted(map(id, layouts))


def test_packs_are_shared_out_evenly_and_what_fills_the_last_turn_teaches_nothing() -> None:
    packs = plan_packs(compiled(ROWS), CONFIG)[:19]
    alone = shared_out(packs, 4, 1)
    shared = shared_out(packs, 4, 4)
    assert (
        [example.layouts for example in alone]
        == [example.layouts for example in shared[:19]]
        == packs
    )
    assert (len(shared), shared[-1].scale) == (20, 0)
    assert alone[0].scale == pytest.approx(4 / sum(len(example.labels) for example in alone[:4]))


# Tensors

FIRST = lay_out(
    (90, 91), [MainRun((11,)), *SEGMENTS[1:4], MainRun((12,))], SCHEME, async_close=CLOSE, end=END
)
SECOND = lay_out((92,), [MainRun((13, 14))], SCHEME, async_close=CLOSE, end=None)


def test_a_pack_and_its_labels_by_hand() -> None:
    batch = packed_batch([FIRST, SECOND])
    answer = [90, 91, 11, OPEN, 99, 32, 100, P20, ASYNC, 101, 102, SYNC, 12]
    assert batch.tokens_T.tolist() == [*answer, 92, 13, 14]
    # The chunk starts where the main thread goes on; the sync follows the chunk's last token.
    assert batch.position_T.tolist() == [*range(8), 8, 9, 10, 11, 12, 0, 1, 2]
    assert batch.document_T.tolist() == [0] * 13 + [1] * 3
    assert batch.thread_T.tolist() == [0] * 8 + [1] * 3 + [0] * 5
    assert batch.visible_until_T.tolist() == [*range(8), 7, 7, 7, 8, 9, 0, 1, 2]
    assert batch.visible_from_T.tolist() == [*range(8), 8, 8, 8, 8, 9, 0, 1, 2]
    pairs = dict(zip(batch.source_L.tolist(), batch.label_L.tolist(), strict=True))
    main = {1: 11, 2: OPEN, 3: 99, 4: 32, 5: 100, 6: P20, 7: SYNC, 11: 12, 12: END}
    assert pairs == main | {8: 101, 9: 102, 10: CLOSE} | {13: 13, 14: 14}
