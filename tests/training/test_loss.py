"""Losses against arithmetic done by hand, log-probabilities against a plain forward.

A label that is given the probability 1/2 costs ln 2, one that is given 1/4 costs 2 ln 2.
"""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pasta_decoding.lang.layout import ChunkRun, Layout, MainRun, PromiseRun, Segment, lay_out
from pasta_decoding.training.loop import Meter
from pasta_decoding.training.sft import label_loss
from pasta_decoding.training.view import Example, label_logprobs, pack, packed_batch, visibility
from tests.examples import few
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SCHEME, answers
from tests.tiny import tiny_llama

CONTROL = 2
HALF = log(2)
QUARTER = 2 * log(2)


def example(*labels: int) -> Example:
    """Return what has these labels; of its layout nothing else matters here."""
    layout = lay_out((90,), [MainRun(labels)], SCHEME, async_close=CLOSE, end=None)
    return Example([layout])


def logprobs(*costs: float) -> list[Tensor]:
    return [-torch.tensor(costs)]


def test_the_loss_is_the_summed_cross_entropy() -> None:
    pack_example = example(0, 0, CONTROL)
    loss, _ = label_loss(logprobs(HALF, QUARTER, HALF), pack_example, control_ids=[CONTROL])
    assert float(loss) == pytest.approx(HALF + QUARTER + HALF)


def test_text_and_control_tokens_are_read_apart_and_then_start_anew() -> None:
    meter = Meter()
    for costs, labels in (([HALF, QUARTER, HALF], (0, 0, CONTROL)), ([QUARTER], (CONTROL,))):
        meter.add(label_loss(logprobs(*costs), example(*labels), control_ids=[CONTROL])[1])
    mean = (HALF + QUARTER) / 2  # of two texts' tokens, and of two control tokens
    figures = {"text_loss": mean, "control_loss": mean, "loss": mean}
    assert meter.read() == pytest.approx(figures)
    assert meter.read() == {}


def test_a_bfloat16_model_has_its_loss_computed_in_float32() -> None:
    layouts = example(11, 12).layouts
    [logprobs_L] = label_logprobs(tiny_llama().bfloat16(), layouts)
    [expected_L] = label_logprobs(tiny_llama(), layouts)
    assert logprobs_L.dtype == torch.float32
    torch.testing.assert_close(logprobs_L, expected_L, atol=0.1, rtol=0)


def test_prompt_and_forced_tokens_carry_no_loss() -> None:
    segments: list[Segment] = [
        MainRun((11, 12), forced=1),
        PromiseRun((OPEN, 20, P20), 20, forced=1),
        ChunkRun((ASYNC, 30), closed=False),
    ]
    layout = lay_out((90, 91), segments, SCHEME, async_close=CLOSE, end=END)
    batch = packed_batch([layout])
    # 91 -> 11; (12 forced) 12 -> OPEN, OPEN -> 20; (P20 forced); ASYNC -> 30; P20 -> the end.
    assert batch.label_L.tolist() == [11, OPEN, 20, END, 30]
    assert layout.tokens[3:7] == (12, OPEN, 20, P20)


def alone(model: torch.nn.Module, layout: Layout) -> torch.Tensor:
    """The log-probabilities by a whole forward with its mask, and one label after the other."""
    batch = packed_batch([layout])
    logits_TV = model(
        input_ids=batch.tokens_T[None],
        position_ids=batch.position_T[None],
        attention_mask=visibility(batch)[None, None],
    ).logits[0]
    logprobs_TV = logits_TV.log_softmax(-1)
    pairs = [(n, label) for n, label in enumerate(layout.label) if label is not None]
    return torch.stack([logprobs_TV[n, label] for n, label in pairs])


@few(10)
@given(st.lists(answers().filter(bool), min_size=1, max_size=4))
def test_packing_changes_no_log_probability(responses: list) -> None:  # type: ignore[type-arg]
    model = tiny_llama()
    layouts = [lay_out((11,), r, SCHEME, async_close=CLOSE, end=END) for r in responses]
    scored = [
        logprobs_L
        for layouts_of_pack in pack(layouts, 30)
        for logprobs_L in label_logprobs(model, layouts_of_pack)
    ]
    for layout, logprobs_L in zip(layouts, scored, strict=True):
        torch.testing.assert_close(logprobs_L, alone(model, layout), atol=1e-4, rtol=0)
