"""From rows to packs: what is left out, what is laid out, in which order it is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Layout
from pasta_decoding.lang.tree import Span, show
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.load import load_tokenizer
from pasta_decoding.models.prompt import Message
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.packs import compile_rows, plan_packs, shared_out
from tests.checkpoint import END_ID, byte_tokenizer, make_base
from tests.shapes import make_llama3
from tests.training.tiny_runs import CONFIG, ROWS, chunk

TOKENIZER = byte_tokenizer()
CONTROL = choose_tokens(TOKENIZER)


def compiled(rows: Sequence[Row], config: SftConfig = CONFIG) -> list[Layout]:
    """Return the layouts of rows."""
    return compile_rows(rows, TOKENIZER, CONTROL, config, end=END_ID)


def test_rows_that_cannot_be_used_are_left_out_counted_and_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    unusable = [
        Row("5", "", "x" * 300, "Too late."),
        Row("6", "", "Why?", "No <promise tokens='x'> and an <async>end"),
        Row("7", "", "Why?", "</async>"),
        Row("8", "", "Why?", " \n"),
        Row("11", "", "Why?", show((Span(ROWS[0].response),))),
        Row("9", "", " ", "To what?"),
        Row("10", "", "y" * 300, "Too late."),
    ]
    assert len(compiled([*ROWS, *unusable])) == 4
    assert caplog.messages == [
        "2 rows left out, the first is 5: longer than 256 tokens",
        "1 rows left out, the first is 6: broken tags (promise-without-async)",
        "1 rows left out, the first is 7: broken tags (stray-close)",
        "1 rows left out, the first is 8: empty response",
        "1 rows left out, the first is 11: annotated twice: its tags are text",
        "1 rows left out, the first is 9: the prompt is empty",
    ]
    with pytest.raises(PastaError, match=r"^no row to train on$") as caught:
        compiled(unusable)
    assert caught.value.hint == "Raise --max-length or give other rows."


def test_without_topics_the_same_rows_teach_promises_that_are_closed_at_once() -> None:
    bare = [replace(row, response=re.sub(' topic="[^"]*"', "", row.response)) for row in ROWS]
    config = replace(CONFIG, topic="none")
    layouts = compiled(ROWS, config)
    assert layouts == compiled(bare, config)
    tokens = [token for layout in layouts for token in layout.tokens]
    behind = [tokens[place + 1] for place, id_ in enumerate(tokens) if id_ == CONTROL.promise_open]
    assert behind == [CONTROL.promise_close[20]] * 6
    assert len(compiled(bare)) == 1


def test_earlier_turns_are_part_of_the_prompt_and_carry_no_loss() -> None:
    history = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Ho."))
    [alone], [behind] = compiled(ROWS[3:]), compiled([replace(ROWS[3], history=history)])
    shown = TOKENIZER.decode(list(behind.tokens))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in shown
    assert shown.index("Ho.<|im_end|>") < shown.index("Hello?")
    labels = [[label for label in one.label if label is not None] for one in (alone, behind)]
    assert labels[0] == labels[1]


def test_the_same_rows_teach_each_tokenizer_its_own_lengths(tmp_path: Path) -> None:
    """One takes these words whole, as large vocabularies do; the other writes them in bytes."""
    text = "user1assistant2system3user4assistant5system6user"
    rows = [replace(ROWS[0], response=chunk("Roles", text))]  # which says 20 tokens
    bases = {13: make_llama3(tmp_path / "llama3"), 48: make_base(tmp_path / "bytes")}
    for tokens, base in bases.items():
        tokenizer = load_tokenizer(base)
        control, end = choose_tokens(tokenizer), tokenizer.eos_token_id
        [layout] = compile_rows(rows, tokenizer, control, CONFIG, end=end)
        begin = layout.tokens.index(control.async_open)
        assert sum(thread == 1 for thread in layout.thread) - 1 == tokens
        assert layout.tokens[begin - 1] == control.promise_close[control.bucket(tokens)]


def test_the_scheme_places_the_tokens_and_nothing_else() -> None:
    shared, reserved = compiled(ROWS), compiled(ROWS, replace(CONFIG, scheme="reserve"))
    assert [layout.position for layout in shared] != [layout.position for layout in reserved]
    unplaced = [[replace(one, position=()) for one in some] for some in (shared, reserved)]
    assert unplaced[0] == unplaced[1]


def test_packs_of_all_epochs_are_fixed_in_advance_and_each_epoch_shows_every_row() -> None:
    layouts = compiled(ROWS)
    all_epochs = replace(CONFIG, max_steps=None)
    packs = plan_packs(layouts, all_epochs)
    assert packs == plan_packs(layouts, all_epochs)
    assert packs[:20] == plan_packs(layouts, CONFIG)
    shown = [layout for layouts_of_pack in packs for layout in layouts_of_pack]
    for epoch in range(20):
        assert sorted(map(id, shown[4 * epoch : 4 * epoch + 4])) == sorted(map(id, layouts))


def test_packs_are_shared_out_evenly_and_what_fills_the_last_turn_teaches_nothing() -> None:
    packs = plan_packs(compiled(ROWS), CONFIG)[:19]
    alone, shared = shared_out(packs, 4, 1), shared_out(packs, 4, 4)
    assert [one.layouts for one in alone] == [one.layouts for one in shared[:19]] == packs
    assert (len(shared), shared[-1].labels) == (20, [])
    step = alone[:4]
    assert step[0].scale == pytest.approx(4 / sum(len(one.labels) for one in step))
