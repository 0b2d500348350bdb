"""The loss against arithmetic done by hand.

Probabilities are powers of one half, so every loss is a multiple of ln 2: the label that is
given 1/2 costs ln 2, the one that is given 1/4 costs 2 ln 2.
"""

from __future__ import annotations

from math import log
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Run, Segment, lay_out
from pasta_decoding.training.loss import LossMeter
from pasta_decoding.training.view import packed_batch
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SCHEME, SIZE

CONTROL = 2
HALF, QUARTER = log(2), 2 * log(2)
LOGITS_LV = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()


def outputs(logits_LV: Tensor) -> SimpleNamespace:
    """What a model returns for a batch of one pack."""
    return SimpleNamespace(logits=logits_LV[None])


def test_the_loss_is_the_summed_cross_entropy_over_the_labels_of_the_whole_step() -> None:
    labels = torch.tensor([[0, 0, CONTROL]])
    meter = LossMeter([CONTROL])
    expected = HALF + QUARTER + HALF
    alone = meter.loss(outputs(LOGITS_LV), labels)
    assert float(alone) == pytest.approx(expected / 3)
    in_a_step = meter.loss(outputs(LOGITS_LV), labels, num_items_in_batch=8)
    assert float(in_a_step) == pytest.approx(expected / 8)


def test_text_and_control_tokens_are_read_apart_and_then_start_anew() -> None:
    meter = LossMeter([CONTROL])
    meter.loss(outputs(LOGITS_LV), torch.tensor([[0, 0, CONTROL]]))
    meter.loss(outputs(LOGITS_LV[:1]), torch.tensor([[CONTROL]]))
    text, control = (HALF + QUARTER) / 2, (HALF + QUARTER) / 2
    assert meter.read() == pytest.approx({"text_loss": text, "control_loss": control, "loss": text})
    assert meter.read() == {}
    meter.loss(outputs(LOGITS_LV[:1]), torch.tensor([[0]]))
    assert meter.read() == pytest.approx({"text_loss": HALF, "loss": HALF})


def test_the_gradient_is_what_was_predicted_minus_what_was_right() -> None:
    logits_LV = LOGITS_LV[:1].clone().requires_grad_()
    loss = LossMeter([]).loss(outputs(logits_LV), torch.tensor([[1]]), num_items_in_batch=4)
    torch.autograd.backward(loss)
    expected = torch.tensor([[0.5, 0.25 - 1, 0.25]]) / 4
    assert logits_LV.grad is not None
    torch.testing.assert_close(logits_LV.grad, expected)


def test_a_bfloat16_model_has_its_loss_computed_in_float32() -> None:
    logits_LV = torch.zeros(1, 1000, dtype=torch.bfloat16)
    loss = LossMeter([]).loss(outputs(logits_LV), torch.tensor([[0]]))
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
    meter = LossMeter([OPEN, ASYNC, CLOSE, P20])
    logits_LV = torch.zeros(len(batch.label_L), SIZE)
    loss = meter.loss(outputs(logits_LV), batch.label_L[None], num_items_in_batch=1)
    assert float(loss) == pytest.approx(5 * log(SIZE))
    assert meter.read() == pytest.approx(
        dict.fromkeys(("text_loss", "control_loss", "loss"), log(SIZE))
    )
