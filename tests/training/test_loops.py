"""Answers that loop: how they are made, and what is lost on them, by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.lines import read_lines
from pasta_decoding.lang.layout import Run, lay_out
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.loading import load_tokenizer
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loops import (
    LoopLayout,
    draw_list,
    draw_loop,
    empty_list,
    looped,
    sentences,
)
from pasta_decoding.training.loss import LossMeter
from pasta_decoding.training.sft import loop_rows, train_sft
from pasta_decoding.training.view import view
from tests.checkpoint import BASE_NAME, TinyCheckpoint
from tests.law.world import CLOSE, END, SCHEME

PROMPT, BEFORE, SENTENCE = (10, 11, 12), (13, 14), (20, 21, 22)


def loop(times: int = 3) -> LoopLayout:
    """A sentence of three tokens behind two others."""
    return looped(PROMPT, BEFORE, SENTENCE, times, SCHEME, async_close=CLOSE)


def test_a_loop_is_a_plain_answer_without_an_end_whose_repetitions_point_back() -> None:
    made = loop()
    assert made.tokens == (*PROMPT, *BEFORE, *SENTENCE * 3)
    assert set(made.thread) == {0}
    assert made.label[-1] is None  # what comes next is not known
    labels = [label for label in made.label if label is not None]
    assert labels == [*BEFORE, *SENTENCE * 3]
    assert made.again == [None] * 5 + [2, 3, 4, 5, 6, 7]
    for at, earlier in enumerate(made.again):
        if earlier is not None:
            assert labels[earlier] == labels[at]


def test_a_pack_points_within_each_answer_and_ordinary_ones_repeat_nothing() -> None:
    plain = lay_out(PROMPT, [Run((13, 14))], SCHEME, async_close=CLOSE, end=END)
    packed = view([plain, loop(2), plain])
    again = packed.again_L.tolist()
    assert len(again) == len(packed.label_L)
    assert again == [-1] * 3 + [-1] * 5 + [5, 6, 7] + [-1] * 3
    for at, earlier in enumerate(again):
        if earlier >= 0:
            assert packed.label_L[earlier] == packed.label_L[at]


@pytest.mark.parametrize("text", ["One. Two!\n\n1. Three? Four", "no end", "", "\n\n...", "a.b"])
def test_no_sentence_loses_a_letter(text: str) -> None:
    assert "".join(sentences(text)).strip(".!?\n ") == text.strip(".!?\n ")
    assert sentences("One. Two!\n1. Three") == ["One.", " Two!\n", "1.", " Three"]


def test_a_drawn_loop_fits_and_repeats_at_least_once() -> None:
    encoded = [(1,) * 30, (2,) * 50, (3,) * 4]
    kinds = set()
    for seed in range(50):
        drawn = draw_loop(encoded, 100, random.Random(seed))
        kinds.add(drawn is None)
        if drawn is not None:
            before, sentence, times = drawn
            assert times >= 2
            assert len(before) + len(sentence) * times <= 100
    assert kinds == {True, False}  # 30 + 2 x 50 do not fit
    assert draw_loop([], 100, random.Random(0)) is None
    assert draw_loop([()], 100, random.Random(0)) is None


def test_an_empty_list_points_at_itself_and_its_first_marker_is_left_alone() -> None:
    made = empty_list(PROMPT, BEFORE, (30, 31), (32, 33, 34), SCHEME, async_close=CLOSE)
    assert made.tokens == (*PROMPT, *BEFORE, 30, 31, 32, 33, 34)
    assert [label for label in made.label if label is not None] == [*BEFORE, 32, 33, 34]
    assert made.label[2:] == (*BEFORE, None, None, 32, 33, 34, None)
    assert made.again == [None, None, 2, 3, 4]
    assert view([loop(2), made]).again_L.tolist()[-3:] == [8 + 2, 8 + 3, 8 + 4]


def test_a_drawn_list_stands_behind_a_sentence_and_fits() -> None:
    encoded = [(1,) * 30, (2,) * 50]
    befores = set()
    for seed in range(50):
        drawn = draw_list(encoded, lambda text: [3] * len(text), 85, random.Random(seed))
        if drawn is not None:
            before, marker, more = drawn
            befores.add(len(before))
            assert marker
            assert more
            assert len(before) + len(marker) + len(more) <= 85
    assert befores == {30}  # behind 80 there is no room
    assert draw_list([], lambda _text: [3], 100, random.Random(0)) is not None


def test_what_is_compared_with_itself_costs_less_the_less_likely_it_is() -> None:
    logits_LV = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log().requires_grad_()
    outputs = SimpleNamespace(logits=logits_LV[None])
    labels, again_L = torch.tensor([[0, 0]]), torch.tensor([-1, 1])
    lost = LossMeter([]).loss(outputs, labels, 1, again_L=again_L)
    assert float(lost.detach()) == pytest.approx(log(2) - log(1 - 0.75 / 2))
    torch.autograd.backward(lost)
    assert logits_LV.grad is not None
    assert logits_LV.grad[1, 0] > 0


def test_a_repeated_label_costs_its_distance_from_half_of_what_it_had() -> None:
    # The probabilities of label 0: a half, then three quarters where a quarter was right.
    logits_LV = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    outputs = SimpleNamespace(logits=logits_LV[None])
    labels, again_L = torch.tensor([[0, 0]]), torch.tensor([-1, 0])
    meter = LossMeter([])
    lost = meter.loss(outputs, labels, 1, again_L=again_L)
    assert float(lost) == pytest.approx(log(2) + log(2))  # -ln(1 - |0.75 - 0.25|)
    assert meter.read() == pytest.approx({"text_loss": log(2), "loop_loss": log(2)})
    exact = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    lost = meter.loss(SimpleNamespace(logits=exact[None]), labels, 1, again_L=again_L)
    assert float(lost) == pytest.approx(log(2))


def test_the_gradient_lowers_the_repetition_and_leaves_what_is_repeated() -> None:
    logits_LV = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log().requires_grad_()
    outputs = SimpleNamespace(logits=logits_LV[None])
    labels, again_L = torch.tensor([[0, 0]]), torch.tensor([-1, 0])
    torch.autograd.backward(LossMeter([]).loss(outputs, labels, 1, again_L=again_L))
    assert logits_LV.grad is not None
    torch.testing.assert_close(logits_LV.grad[0], torch.tensor([-0.5, 0.5]))  # cross entropy's
    assert logits_LV.grad[1, 0] > 0
    assert logits_LV.grad[1, 1] < 0


def test_labels_that_repeat_nothing_are_as_they_were() -> None:
    logits_LV = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    outputs, labels = SimpleNamespace(logits=logits_LV[None]), torch.tensor([[0, 1]])
    plain = LossMeter([]).loss(outputs, labels)
    marked = LossMeter([]).loss(outputs, labels, again_L=torch.tensor([-1, -1]))
    assert float(plain) == float(marked)


@pytest.fixture(scope="module")
def told(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a training on two answers, and as many that loop."""
    out = tmp_path_factory.mktemp("loops") / "out"
    rows = [Row("1", "", "Two cities?", "Paris. Rome."), Row("2", "", "Sum?", "One. Two. Three.")]
    config = SftConfig(
        data=("two.jsonl",),
        base_name=BASE_NAME,
        epochs=20,
        learning_rate=2e-2,
        max_tokens=128,
        loop_share=0.5,
        bf16=False,
    )
    lines: list[str] = []
    train_sft(config, rows, base=tiny_checkpoint.base, out=out, say=lines.append)
    (out / "said").write_text("\n".join(lines), encoding="utf-8")
    return out


def test_a_training_with_loops_says_how_many_there_are_and_unlearns_them(told: Path) -> None:
    assert "2 answers that loop beside them" in (told / "said").read_text(encoding="utf-8")
    lines = read_lines(told / "metrics.jsonl")
    read = [line for line in lines if "loop_loss" in line]
    assert read[-1]["text_loss"] < read[0]["text_loss"]
    assert read[-1]["loop_loss"] < 0.5


def test_loops_are_the_same_whenever_a_run_is_planned(tiny_checkpoint: TinyCheckpoint) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint.base)
    control = choose_tokens(tokenizer)
    rows = [Row(str(n), "", "Which?", f"First {n}. Then {n}. Last {n}.") for n in range(5)]
    config = SftConfig(data=(), base_name="", loop_share=0.25, seed=3)
    made = loop_rows(rows, tokenizer, control, config, answers=9)
    assert len(made) == 3
    assert made == loop_rows(rows, tokenizer, control, config, answers=9)
    assert made != loop_rows(rows, tokenizer, control, replace(config, seed=4), answers=9)
    assert loop_rows(rows, tokenizer, control, replace(config, loop_share=0.0), answers=9) == []
