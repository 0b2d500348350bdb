"""Losses against arithmetic done by hand, log-probabilities against a plain forward.

Probabilities are powers of one half, so every loss is a multiple of ln 2: the label that is
given 1/2 costs ln 2, the one that is given 1/4 costs 2 ln 2.
"""

from __future__ import annotations

from math import log
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pasta_decoding.lang.layout import ChunkRun, Layout, PromiseRun, Run, Segment, lay_out
from pasta_decoding.training.loss import LabelLoss, label_logprobs, score_layouts
from pasta_decoding.training.view import packed_batch, visibility
from tests.examples import few
from tests.law.world import (
    ASYNC,
    CHUNK_AFTER_SYNC,
    CLOSE,
    END,
    OPEN,
    P20,
    SCHEME,
    SIZE,
    answers,
)
from tests.tiny import tiny_gemma3, tiny_llama

CONTROL = 2
HALF, QUARTER = log(2), 2 * log(2)
LOGITS_LV = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()


def outputs(logits_LV: Tensor) -> SimpleNamespace:
    """What a model returns for a batch of one pack."""
    return SimpleNamespace(logits=logits_LV[None])


def test_the_loss_is_the_summed_cross_entropy_over_the_labels_of_the_whole_step() -> None:
    labels, loss = torch.tensor([[0, 0, CONTROL]]), LabelLoss([CONTROL])
    expected = HALF + QUARTER + HALF
    assert float(loss(outputs(LOGITS_LV), labels)) == pytest.approx(expected / 3)
    in_a_step = loss(outputs(LOGITS_LV), labels, num_items_in_batch=8)
    assert float(in_a_step) == pytest.approx(expected / 8)


def test_text_and_control_tokens_are_read_apart_and_then_start_anew() -> None:
    loss = LabelLoss([CONTROL])
    loss(outputs(LOGITS_LV), torch.tensor([[0, 0, CONTROL]]))
    loss(outputs(LOGITS_LV[:1]), torch.tensor([[CONTROL]]))
    text, control = (HALF + QUARTER) / 2, (HALF + QUARTER) / 2
    figures = {"text_loss": text, "control_loss": control, "loss": text}
    assert loss.meter.read() == pytest.approx(figures)
    assert loss.meter.read() == {}
    loss(outputs(LOGITS_LV[:1]), torch.tensor([[0]]))
    assert loss.meter.read() == pytest.approx({"text_loss": HALF, "loss": HALF})


def test_the_gradient_is_what_was_predicted_minus_what_was_right() -> None:
    logits_LV = LOGITS_LV[:1].clone().requires_grad_()
    loss = LabelLoss([])(outputs(logits_LV), torch.tensor([[1]]), num_items_in_batch=4)
    torch.autograd.backward(loss)
    expected = torch.tensor([[0.5, 0.25 - 1, 0.25]]) / 4
    assert logits_LV.grad is not None
    torch.testing.assert_close(logits_LV.grad, expected)


def test_a_bfloat16_model_has_its_loss_computed_in_float32() -> None:
    logits_LV = torch.zeros(1, 1000, dtype=torch.bfloat16)
    loss = LabelLoss([])(outputs(logits_LV), torch.tensor([[0]]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(log(1000), rel=1e-6)


def test_prompt_and_forced_tokens_carry_no_loss() -> None:
    """All logits are equal, so every label costs ln V; what is forced is nobody's choice."""
    segments: list[Segment] = [
        Run((11, 12), forced=1),
        PromiseRun((OPEN, 20, P20), 20, forced=1),
        ChunkRun((ASYNC, 30), closed=False),
    ]
    layout = lay_out((90, 91), segments, SCHEME, async_close=CLOSE, end=END)
    batch = packed_batch([layout])
    # 91 -> 11; (12 forced) 12 -> OPEN, OPEN -> 20; (P20 forced); ASYNC -> 30; P20 -> the end.
    assert batch.label_L.tolist() == [11, OPEN, 20, END, 30]
    assert layout.tokens[3:7] == (12, OPEN, 20, P20)
    loss = LabelLoss([OPEN, ASYNC, CLOSE, P20])
    logits_LV = torch.zeros(len(batch.label_L), SIZE)
    found = loss(outputs(logits_LV), batch.label_L[None], num_items_in_batch=1)
    assert float(found) == pytest.approx(5 * log(SIZE))
    names = ("text_loss", "control_loss", "loss")
    assert loss.meter.read() == pytest.approx(dict.fromkeys(names, log(SIZE)))


def alone(model: torch.nn.Module, layout: Layout) -> torch.Tensor:
    """The log-probabilities by a whole forward with its mask, and one label after the other."""
    one = packed_batch([layout])
    logits_TV = model(
        input_ids=one.tokens_T[None],
        position_ids=one.position_T[None],
        attention_mask=visibility(one)[None, None],
    ).logits[0]
    logprobs_TV = logits_TV.log_softmax(-1)
    pairs = [(n, label) for n, label in enumerate(layout.label) if label is not None]
    return torch.stack([logprobs_TV[n, label] for n, label in pairs])


@few(10)
@given(st.lists(answers().filter(bool), min_size=1, max_size=4))
def test_packing_changes_no_log_probability(responses: list) -> None:  # type: ignore[type-arg]
    model = tiny_llama()
    layouts = [lay_out((11,), r, SCHEME, async_close=CLOSE, end=END) for r in responses]
    for layout, scored in zip(layouts, score_layouts(model, layouts, pack_tokens=30), strict=True):
        torch.testing.assert_close(scored, alone(model, layout), atol=1e-4, rtol=0)


def test_every_label_has_its_log_probability_and_gradients_flow() -> None:
    layout = lay_out((11,), CHUNK_AFTER_SYNC, SCHEME, async_close=CLOSE, end=END)
    (scored,) = label_logprobs(tiny_gemma3(), [layout])
    assert len(scored) == sum(label is not None for label in layout.label)
    assert scored.requires_grad
