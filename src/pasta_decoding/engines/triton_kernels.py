"""The kernels of paged attention: see `attention`. Imported on a GPU only.

The softmax is computed online, block by block, in float32. Where a pass has few rows, a row's list
is split among programs, and a second kernel adds up their results (flash-decoding).

Shapes: Q rows, H heads, G kv heads, S slots, D head width, P splits of a list.
"""

# mypy: ignore-errors
# ruff: noqa: PLR0915

import torch
import triton
import triton.language as tl
from torch import Tensor

from pasta_decoding.engines.slot_rows import SlotRows

PROGRAMS = 256
"""A list is split until there are about this many programs: a GPU has about half as many cores."""
MAX_SPLITS = 16


def attend(
    query_QHD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    rows: SlotRows,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return the attention output of each row, [Q, H, D]: `attend_plainly` is the formula."""
    queries, heads, key_width = query_QHD.shape
    kv_heads, _, width = values_GSD.shape
    assert query_QHD.stride(2) == keys_GSD.stride(2) == values_GSD.stride(2) == 1, "rows lie whole"
    splits_for_all_programs = max(1, PROGRAMS // (queries * kv_heads))
    power_of_two = 1 << (splits_for_all_programs.bit_length() - 1)
    splits = min(MAX_SPLITS, power_of_two)
    padded = triton.next_power_of_2(max(key_width, width))
    group = heads // kv_heads
    out_QHD = query_QHD.new_empty(queries, heads, width)
    in_float32 = {"dtype": torch.float32, "device": out_QHD.device}
    sums_QHPD = torch.empty(queries, heads, splits, width, **in_float32)
    maxima_QHP = torch.empty(queries, heads, splits, **in_float32)
    totals_QHP = torch.empty(queries, heads, splits, **in_float32)
    _attend[(queries, kv_heads, splits)](
        query_QHD, keys_GSD, values_GSD, out_QHD, sums_QHPD, maxima_QHP, totals_QHP,
        rows.lists, rows.starts_Q, rows.lengths_Q, rows.positions_Q, rows.positions_S,
        float(scaling), query_QHD.stride(0), query_QHD.stride(1), keys_GSD.stride(0),
        keys_GSD.stride(1), values_GSD.stride(0), values_GSD.stride(1),
        GROUP=group, HEADS=max(16, triton.next_power_of_2(group)), KEY_WIDTH=key_width,
        WIDTH=width, PADDED=max(16, padded), SPLITS=splits, WINDOW=window or 0,
        BLOCK=64 if padded * keys_GSD.element_size() <= 256 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _add_up[(queries, heads)](
            sums_QHPD, maxima_QHP, totals_QHP, out_QHD, WIDTH=width, PADDED=max(16, padded),
            SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out_QHD


@triton.jit
def _attend(
    query, keys, values, out, split_sums, split_maxima, split_totals,
    lists, starts, lengths, positions, slot_positions, scaling,
    query_row_stride, query_head_stride, key_head_stride, key_slot_stride, value_head_stride,
    value_slot_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, the heads of one kv head, one split of the row's list."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    position = tl.load(positions + row)
    split_length = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    first = split * split_length
    end = tl.minimum(first + split_length, length)

    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED)
    query_heads = (kv_head * GROUP + heads)[:, None]
    query_rows = query + row * query_row_stride + query_heads * query_head_stride
    query_block = tl.load(
        query_rows + columns[None, :],
        mask=(heads < GROUP)[:, None] & (columns < KEY_WIDTH)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted_sum = tl.zeros([HEADS, PADDED], tl.float32)
    for block in range(first, end, BLOCK):
        indices = block + tl.arange(0, BLOCK)
        seen = indices < end
        slots = tl.load(lists + start + indices, mask=seen, other=0).to(tl.int64)
        if WINDOW > 0:
            seen = seen & (position - tl.load(slot_positions + slots) < WINDOW)
        key = tl.load(
            keys + kv_head * key_head_stride + slots[None, :] * key_slot_stride + columns[:, None],
            mask=seen[None, :] & (columns < KEY_WIDTH)[:, None],
            other=0.0,
        )
        score = tl.dot(query_block, key, input_precision="ieee") * scaling
        score = tl.where(seen[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        sees_nothing_yet = new_maximum == float("-inf")
        base = tl.where(sees_nothing_yet, 0.0, new_maximum)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(maximum - base)
        value = tl.load(
            values
            + kv_head * value_head_stride
            + slots[:, None] * value_slot_stride
            + columns[None, :],
            mask=seen[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        weighted_sum = weighted_sum * shrink[:, None]
        weighted_sum += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum

    head = row * (tl.num_programs(1) * GROUP) + kv_head * GROUP + heads
    is_output = (heads < GROUP)[:, None] & (columns < WIDTH)[None, :]
    if SPLITS == 1:
        result = weighted_sum / tl.where(total > 0, total, 1.0)[:, None]
        offsets = head[:, None] * WIDTH + columns[None, :]
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_output)
    else:
        index = head * SPLITS + split
        offsets = index[:, None] * WIDTH + columns[None, :]
        tl.store(split_sums + offsets, weighted_sum, mask=is_output)
        tl.store(split_maxima + index, maximum, mask=heads < GROUP)
        tl.store(split_totals + index, total, mask=heads < GROUP)


@triton.jit
def _add_up(
    split_sums, split_maxima, split_totals, out,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row, one head: add up the results of the splits of its list."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = head * SPLITS + tl.arange(0, SPLITS)
    columns = tl.arange(0, PADDED)
    maxima = tl.load(split_maxima + splits)
    maximum = tl.max(maxima, 0)
    weight = tl.exp(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(tl.load(split_totals + splits) * weight, 0)
    sums = tl.load(
        split_sums + splits[:, None] * WIDTH + columns[None, :],
        mask=(columns < WIDTH)[None, :],
        other=0.0,
    )
    result = tl.sum(sums * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * WIDTH + columns, result.to(out.dtype.element_ty), mask=columns < WIDTH)
