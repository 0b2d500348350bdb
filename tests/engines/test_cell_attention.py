"""The operator of compiled passes computes attention, whatever the shapes of requests and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pasta_decoding.engines.attention import KeyShape, SlotLayer, slot_cache
from pasta_decoding.engines.cell_attention import Seen, looking_at
from pasta_decoding.engines.kv_cache import BatchItem, BoolArray
from tests.engines.subjects import compiled_tiny

pytestmark = pytest.mark.timeout(900)

Shapes = Sequence[tuple[int, int]]
"""Queries and cells of each request."""


@pytest.fixture(autouse=True)
def operator() -> Any:
    """Load it, with whichever program."""
    compiled_tiny("llama")


@dataclass
class Case:
    """A pass over random cells: queries, new keys and values, and what each request sees."""

    query_1HQD: Tensor
    key_1GQD: Tensor
    value_1GQD: Tensor
    layer: SlotLayer
    items: list[BatchItem]

    def found(self, window: int | None = None) -> Tensor:
        seen = Seen.of(self.items, (None, 5))
        with looking_at([self.layer], seen):
            return torch.ops.pasta.attend(
                self.query_1HQD, self.key_1GQD, self.value_1GQD, 0, 0.3, window
            )

    def expected(self, window: int | None = None) -> Tensor:
        """Return out_1QHD, computed one query at a time in float64."""
        keys_GCD, values_GCD = (one[0].double() for one in self.layer.held())
        query_HQD = self.query_1HQD[0].double()
        out_QHD = torch.zeros(query_HQD.shape[1], len(query_HQD), query_HQD.shape[2]).double()
        shared, first = len(query_HQD) // len(keys_GCD), 0
        for item in self.items:
            mask_QK = torch.from_numpy(item.visible(window).copy())
            for place, mask_K in enumerate(mask_QK):
                cells = item.start + mask_K.nonzero()[:, 0]
                for head, query_D in enumerate(query_HQD[:, first + place]):
                    keys_KD = keys_GCD[head // shared, cells]
                    weights_K = (keys_KD @ query_D * 0.3).softmax(0)
                    out_QHD[first + place, head] = weights_K @ values_GCD[head // shared, cells]
            first += len(mask_QK)
        return out_QHD[None]


def case(
    requests: Shapes, *, heads: int = 6, kv_heads: int = 2, width: int = 16,
    dtype: torch.dtype = torch.float32, padding: int = 0, plain: bool = False,
) -> Case:  # fmt: skip
    random = np.random.default_rng(7)
    torch.manual_seed(7)
    total = sum(cells for _, cells in requests)
    one_G1D = torch.zeros(kv_heads, 1, width, dtype=dtype)
    cache, _ = slot_cache([KeyShape(one_G1D, one_G1D)], total)
    layer = cache.layers[0]
    assert isinstance(layer, SlotLayer)
    for held in layer.held():
        held.normal_()
    items, start = [], 0
    for queries, cells in requests:
        mask_QK: BoolArray = np.tri(queries, cells, cells - queries, dtype=np.bool_)
        if not plain:
            mask_QK[:, : cells - queries] &= random.random((queries, cells - queries)) < 0.4
        own = list(range(cells - queries, cells))
        items.append(BatchItem((), start, cells - queries, [0] * queries, own, mask_QK,
                               np.arange(cells), [], []))  # fmt: skip
        start += cells
    tokens = sum(queries for queries, _ in requests) + padding
    query_1HQD = torch.randn(1, tokens, heads, width, dtype=dtype).transpose(1, 2)
    key_1GQD, value_1GQD = torch.randn(2, 1, tokens, kv_heads, width, dtype=dtype).transpose(2, 3)
    return Case(query_1HQD, key_1GQD, value_1GQD, layer, items)


@pytest.mark.parametrize(
    "requests",
    [
        [(1, 1)],
        [(1, 200)],
        [(4, 150), (1, 63), (8, 64), (2, 129)],
        [(40, 40), (3, 70)],
        [(1, 30), (50, 300), (33, 33)],
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_it_attends_to_what_each_query_sees(requests: Shapes, plain: bool) -> None:
    one = case(requests, plain=plain)
    found = one.found()
    assert torch.allclose(found.double(), one.expected(), atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 80), (8, 1, 256), (2, 1, 6), (3, 3, 20)]
)
def test_any_heads_and_widths(heads: int, kv_heads: int, width: int) -> None:
    one = case([(3, 100), (40, 90)], heads=heads, kv_heads=kv_heads, width=width)
    assert torch.allclose(one.found().double(), one.expected(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    one = case([(5, 300), (1, 20)], dtype=dtype)
    found, expected = one.found(), one.expected()
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_windows_are_those_of_the_layer() -> None:
    one = case([(3, 90), (40, 40)], plain=True)
    assert torch.allclose(one.found(5).double(), one.expected(5), atol=2e-5)
    assert not torch.allclose(one.found(5), one.found(), atol=0.1)


def test_padding_is_not_written_and_gets_zeros() -> None:
    one = case([(2, 10)], padding=3)
    before = one.layer.held()[0].clone()
    found = one.found()
    assert (found[:, 2:] == 0).all()
    keys_1GCD = one.layer.held()[0]
    assert torch.equal(keys_1GCD[:, :, 8:10], one.key_1GQD[:, :, :2])
    assert torch.equal(keys_1GCD[:, :, :8], before[:, :, :8])
    assert torch.equal(keys_1GCD[:, :, 10:], before[:, :, 10:])


def test_a_pass_that_was_not_told_what_it_sees_is_refused() -> None:
    one = case([(1, 4)])
    one.found()
    with pytest.raises(RuntimeError, match="what this layer sees"):
        torch.ops.pasta.attend(one.query_1HQD, one.key_1GQD, one.value_1GQD, 0, 0.3, None)
