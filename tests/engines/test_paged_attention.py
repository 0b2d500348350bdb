"""Attention over listed slots: the kernel computes the formula, and the formula is attention."""

import pytest
import torch
from torch import Tensor

from pasta_decoding.engines.attention import attend_plainly
from pasta_decoding.engines.slot_rows import SlotRows

SLOTS = 400


def random_rows(lengths: list[int], device: str = "cpu") -> SlotRows:
    """Return rows that see random slots, in random order."""
    lists = [torch.randperm(SLOTS)[:length] for length in lengths]
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    positions_S = torch.randint(0, 300, (SLOTS,))
    positions_Q = torch.randint(0, 300, (len(lengths),))
    padding = torch.zeros(1, dtype=torch.long)
    return SlotRows(
        written_Q=torch.arange(len(lengths)).to(device),
        positions_Q=positions_Q.int().to(device),
        positions_S=positions_S.int().to(device),
        starts_Q=torch.tensor(starts).int().to(device),
        lengths_Q=torch.tensor(lengths).int().to(device),
        lists=torch.cat([*lists, padding]).int().to(device),
    )


def random_inputs(
    heads: int, kv_heads: int, width: int, queries: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query_QHD, not contiguous, as models give it; keys_GSD and values_GSD."""
    query_QHD = torch.randn(heads, queries, width).transpose(0, 1)
    cache = torch.randn(2, kv_heads, SLOTS, width)
    keys_GSD, values_GSD = cache.to(device, dtype)
    return query_QHD.to(device, dtype), keys_GSD, values_GSD


SHAPES = [(4, 2, 64), (6, 1, 80), (3, 3, 96), (8, 1, 128), (4, 4, 256), (20, 1, 16)]
"""Heads, kv heads and their width."""


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[300], [1, 2, 130, 63, 64, 65], [*range(1, 100)] * 4], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
def test_the_kernel_computes_the_formula_on_a_gpu(
    heads: int, kv_heads: int, width: int, window: int | None, dtype: torch.dtype,
    lengths: list[int],
) -> None:  # fmt: skip
    from pasta_decoding.engines.triton_kernels import attend

    torch.manual_seed(width)
    rows = random_rows(lengths, "cuda")
    inputs = random_inputs(heads, kv_heads, width, len(lengths), dtype, "cuda")
    query_QHD, keys_GSD, values_GSD = (tensor.float() for tensor in inputs)
    exact = attend_plainly(query_QHD, keys_GSD, values_GSD, rows, 0.1, window)
    output = attend(*inputs, rows, 0.1, window)
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(output.float(), exact, rtol=0, atol=tolerance)
