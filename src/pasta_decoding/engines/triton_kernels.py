"""The kernels of paged attention: see `attention`. Imported on a GPU only.

The softmax is computed online, block by block, in float32. Where a pass has few rows, a row's list
is split among programs, and a second kernel adds up what they found (flash-decoding).
"""

# mypy: ignore-errors
# ruff: noqa: PLR0915

import torch
import triton
import triton.language as tl
from torch import Tensor

from pasta_decoding.engines.attention import SlotRows

PROGRAMS = 256
"""A list is split until there are about this many programs: a GPU has about half as many cores."""
MOST_SPLITS = 16


def attend(
    query_QHD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    rows: SlotRows,
    scaling: float,
    window: int | None,
) -> Tensor:
    """As `attend_plainly` computes it."""
    queries, heads, key_width = query_QHD.shape
    kv_heads, _, width = values_GSD.shape
    assert query_QHD.stride(2) == keys_GSD.stride(2) == values_GSD.stride(2) == 1, "rows lie whole"
    wanted = max(1, PROGRAMS // (queries * kv_heads))
    splits = min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))
    padded = triton.next_power_of_2(max(key_width, width))
    group = heads // kv_heads
    out_QHD = query_QHD.new_empty(queries, heads, width)
    found_QHPD, best_QHP, total_QHP = (
        torch.empty(queries, heads, splits, *last, dtype=torch.float32, device=out_QHD.device)
        for last in ((width,), (), ())
    )
    _attend[(queries, kv_heads, splits)](
        query_QHD, keys_GSD, values_GSD, out_QHD, found_QHPD, best_QHP, total_QHP,
        rows.lists, rows.starts_Q, rows.lengths_Q, rows.positions_Q, rows.positions_S,
        float(scaling), query_QHD.stride(0), query_QHD.stride(1), keys_GSD.stride(0),
        keys_GSD.stride(1), values_GSD.stride(0), values_GSD.stride(1),
        GROUP=group, HEADS=max(16, triton.next_power_of_2(group)), KEY_WIDTH=key_width,
        WIDTH=width, PADDED=max(16, padded), SPLITS=splits, WINDOW=window or 0,
        BLOCK=64 if padded * keys_GSD.element_size() <= 256 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _add_up[(queries, heads)](
            found_QHPD, best_QHP, total_QHP, out_QHD, WIDTH=width, PADDED=max(16, padded),
            SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out_QHD


@triton.jit
def _attend(
    query, keys, values, out, found, bests, totals, lists, starts, lengths, positions,
    slot_positions, scaling, query_row, query_head, key_head, key_slot, value_head, value_slot,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, the heads of one kv head, one part of the row's list."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    position = tl.load(positions + row)
    share = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    first = split * share
    last = tl.minimum(first + share, length)

    heads = tl.arange(0, HEADS)
    numbers = tl.arange(0, PADDED)
    query_rows = query + row * query_row + (kv_head * GROUP + heads)[:, None] * query_head
    own = tl.load(
        query_rows + numbers[None, :],
        mask=(heads < GROUP)[:, None] & (numbers < KEY_WIDTH)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, PADDED], tl.float32)
    for at in range(first, last, BLOCK):
        places = at + tl.arange(0, BLOCK)
        seen = places < last
        slots = tl.load(lists + start + places, mask=seen, other=0).to(tl.int64)
        if WINDOW > 0:
            seen = seen & (position - tl.load(slot_positions + slots) < WINDOW)
        key = tl.load(
            keys + kv_head * key_head + slots[None, :] * key_slot + numbers[:, None],
            mask=seen[None, :] & (numbers < KEY_WIDTH)[:, None],
            other=0.0,
        )
        score = tl.dot(own, key, input_precision="ieee") * scaling
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing is seen up to here
        weight = tl.exp(score - base[:, None])
        kept = tl.exp(best - base)
        value = tl.load(
            values + kv_head * value_head + slots[:, None] * value_slot + numbers[None, :],
            mask=seen[:, None] & (numbers < WIDTH)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weight, 1)
        sums = sums * kept[:, None]
        sums += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        best = higher

    head = row * (tl.num_programs(1) * GROUP) + kv_head * GROUP + heads
    real = (heads < GROUP)[:, None] & (numbers < WIDTH)[None, :]
    if SPLITS == 1:
        result = sums / tl.where(total > 0, total, 1.0)[:, None]
        place = head[:, None] * WIDTH + numbers[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real)
    else:
        part = head * SPLITS + split
        tl.store(found + part[:, None] * WIDTH + numbers[None, :], sums, mask=real)
        tl.store(bests + part, best, mask=heads < GROUP)
        tl.store(totals + part, total, mask=heads < GROUP)


@triton.jit
def _add_up(
    found, bests, totals, out,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row, one head: add up what the parts of its list gave."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts = head * SPLITS + tl.arange(0, SPLITS)
    numbers = tl.arange(0, PADDED)
    best = tl.load(bests + parts)
    highest = tl.max(best, 0)
    weight = tl.exp(best - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(totals + parts) * weight, 0)
    sums = tl.load(
        found + parts[:, None] * WIDTH + numbers[None, :],
        mask=(numbers < WIDTH)[None, :],
        other=0.0,
    )
    result = tl.sum(sums * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * WIDTH + numbers, result.to(out.dtype.element_ty), mask=numbers < WIDTH)
