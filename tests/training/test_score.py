"""Scores against a plain forward of one answer at a time, worked out label by label."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.layout import Layout, lay_out
from pasta_decoding.training.loss import label_logprobs, score_layouts
from pasta_decoding.training.view import packed_batch, visibility
from tests.examples import few
from tests.law.world import CHUNK_AFTER_SYNC, CLOSE, END, SCHEME, answers
from tests.tiny import tiny_gemma3, tiny_llama


def alone(model: torch.nn.Module, layout: Layout) -> torch.Tensor:
    """The same by a whole forward with its mask, and one label after the other."""
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
def test_packing_changes_no_score(responses: list) -> None:  # type: ignore[type-arg]
    model = tiny_llama()
    layouts = [lay_out((11,), r, SCHEME, async_close=CLOSE, end=END) for r in responses]
    for layout, scored in zip(layouts, score_layouts(model, layouts, pack_tokens=30), strict=True):
        torch.testing.assert_close(scored, alone(model, layout), atol=1e-4, rtol=0)


def test_every_label_has_its_score_and_gradients_flow() -> None:
    layout = lay_out((11,), CHUNK_AFTER_SYNC, SCHEME, async_close=CLOSE, end=END)
    (scored,) = label_logprobs(tiny_gemma3(), [layout])
    assert len(scored) == sum(label is not None for label in layout.label)
    assert scored.requires_grad
