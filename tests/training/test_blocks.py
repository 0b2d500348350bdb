"""Block masks for flex attention, from the same integers as dense masks: equal, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedModel

from pasta_decoding.lang.layout import Layout, lay_out
from pasta_decoding.training.loss import label_logprobs, score_layouts
from pasta_decoding.training.view import (
    block_mask,
    packed_batch,
    takes_blocks,
    visibility,
)
from tests.examples import few
from tests.law.world import CHUNK_AFTER_SYNC, CLOSE, END, SCHEME, answers
from tests.tiny import TINY_MODELS

BLOCK = 128
LAYOUT = lay_out((11,), CHUNK_AFTER_SYNC, SCHEME, async_close=CLOSE, end=END)
# More than two blocks of keys, in two answers that do not see each other.
LONG = lay_out(range(100, 250), CHUNK_AFTER_SYNC, SCHEME, async_close=CLOSE, end=END)


def cells(mask: BlockMask, size: int) -> Tensor:
    """Return what a kernel computes from a block mask: whole blocks, and cells of partial ones."""
    mask_QK = torch.zeros(-(-size // BLOCK) * BLOCK, -(-size // BLOCK) * BLOCK, dtype=torch.bool)
    index = torch.arange(BLOCK)
    blocks = (mask.kv_num_blocks, mask.kv_indices, False)
    whole = (mask.full_kv_num_blocks, mask.full_kv_indices, True)
    for counts, indices, all_of_it in (blocks, whole):
        assert counts is not None
        assert indices is not None
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                query, key = row * BLOCK + index[:, None], column * BLOCK + index[None, :]
                inside = (query < size) & (key < size)
                query, key = query.clamp(max=size - 1), key.clamp(max=size - 1)
                zero = torch.tensor(0)
                seen = inside & (all_of_it | mask.mask_mod(zero, zero, query, key))
                mask_QK[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK] = seen
    return mask_QK[:size, :size]


@few(10)
@given(st.lists(answers().filter(bool), min_size=1, max_size=3), st.sampled_from([None, 3, 40]))
def test_both_masks_show_the_same_cells(responses: list[Any], window: int | None) -> None:
    layouts = [lay_out((11,), r, SCHEME, async_close=CLOSE, end=END) for r in responses]
    batch = packed_batch([*layouts, LONG, *layouts])
    size = len(batch.tokens_T)
    assert size > BLOCK
    mask = block_mask(batch, window)
    assert torch.equal(cells(mask, size), visibility(batch, window))


def test_blocks_that_nobody_sees_are_left_out() -> None:
    """Two answers of a pack do not see each other, so half of the causal half is empty."""
    mask = block_mask(packed_batch([LONG, LONG, LONG, LONG]))
    listed = mask.to_dense()[0, 0].bool()
    blocks = len(listed)
    assert blocks >= 5
    assert int(listed.sum()) < blocks * (blocks + 1) // 2


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers call flex attention without compiling it first, which takes a minute."""

    def uncompiled(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        settings.pop("training")
        return flex_attention(query, key, value, **settings)

    path = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    monkeypatch.setattr(path, uncompiled)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", TINY_MODELS.values(), ids=TINY_MODELS)
def test_a_model_computes_the_same_with_blocks_as_with_a_dense_mask(
    make: Callable[..., PreTrainedModel],
) -> None:
    model, layouts = make(vocabulary=300), [LAYOUT, LONG]
    assert not takes_blocks(model)
    dense = torch.cat(list(score_layouts(model, layouts)))
    model.set_attn_implementation("flex_attention")
    assert takes_blocks(model)
    blocks = torch.cat(list(score_layouts(model, layouts)))
    torch.testing.assert_close(blocks, dense, atol=1e-4, rtol=0)


def scores_and_gradient(model: PreTrainedModel, layouts: list[Layout]) -> tuple[Tensor, Tensor]:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    scores = torch.cat(label_logprobs(model, layouts))
    (gradient,) = torch.autograd.grad(scores.sum(), weight)
    return scores.detach(), gradient


@pytest.mark.gpu
@pytest.mark.parametrize("make", TINY_MODELS.values(), ids=TINY_MODELS)
def test_the_compiled_kernel_computes_the_same_on_a_gpu(
    make: Callable[..., PreTrainedModel],
) -> None:
    model: Any = make(vocabulary=300, head_dim=16)
    layouts = [LAYOUT, LONG]
    dense, dense_gradient = scores_and_gradient(model.cuda(), layouts)
    model.set_attn_implementation("flex_attention")
    blocks, blocks_gradient = scores_and_gradient(model, layouts)
    torch.testing.assert_close(blocks, dense, atol=5e-2, rtol=0)
    torch.testing.assert_close(blocks_gradient, dense_gradient, atol=5e-2, rtol=5e-2)
