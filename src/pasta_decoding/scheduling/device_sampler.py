"""Sampling on the device that holds the logits, for all rows of a step at once.

The noise is that of `sampler.sample_token`, so the tokens are the same, apart from near-ties. Only
the chosen ids leave the device, in one transfer.

Shapes: F rows, V vocabulary, K candidates: the whole vocabulary, or a few if each row has a top-k.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.answer.sampler import FIRST_FACTOR, ID_FACTOR, SECOND_FACTOR, UNIT, RowParams
from pasta_decoding.engines.torch import to_device

MAX_TIES = 64
"""Room for this many candidates beyond top-k that are as likely as its last token."""
CUTS = 4
"""Top-p removes losing candidates this many times before the device is asked if it must go on."""


@torch.inference_mode()
def sample_tokens(logits_FV: Tensor, rows: Sequence[RowParams]) -> list[int]:
    """Return the next token of each row."""
    logits_FV = _adjusted(logits_FV, rows)
    likeliest_F1 = logits_FV.argmax(1, keepdim=True)
    if all(row.params.greedy for row in rows):
        return [int(token) for token in likeliest_F1.flatten().tolist()]
    ids_FK, weight_FK, time_FK, enough_F1 = _race(logits_FV, rows)
    winner_F1 = time_FK.argmin(1, keepdim=True)
    # Outside top-p are the tokens for which the heavier ones weigh enough.
    outside_F1 = torch.zeros_like(winner_F1, dtype=torch.bool)
    cuts = CUTS if min(row.params.top_p for row in rows) < 1 else 0
    must_go_on = True
    while must_go_on:
        for _ in range(cuts):
            heavier_FK = weight_FK > weight_FK.gather(1, winner_F1)
            heavier_weight_F1 = (weight_FK * heavier_FK).sum(1, keepdim=True, dtype=torch.float64)
            outside_F1 = heavier_weight_F1 >= enough_F1
            time_FK.masked_fill_(outside_F1 & ~heavier_FK, torch.inf)
            winner_F1 = time_FK.argmin(1, keepdim=True)
        token_F1 = ids_FK.expand_as(time_FK).gather(1, winner_F1)
        # A greedy row has no finite time: it takes the likeliest token.
        has_winner_F1 = time_FK.gather(1, winner_F1).isfinite()
        token_F1 = torch.where(has_winner_F1, token_F1, likeliest_F1)
        *tokens, must_go_on = torch.cat(
            [token_F1.flatten(), outside_F1.any().long()[None]]
        ).tolist()
    return tokens


def _adjusted(logits_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """Return the logits after each row's `Adjustment`; `logits_FV` stays as it is."""
    row_indices = []
    adjustments = []
    for index, row in enumerate(rows):
        if row.adjustment is not None:
            row_indices.append(np.full(len(row.adjustment.ids), index))
            adjustments.append(row.adjustment)
    if not adjustments:
        return logits_FV
    ids = np.concatenate([adjustment.ids for adjustment in adjustments])
    factors = np.concatenate([adjustment.factors for adjustment in adjustments])
    added = np.concatenate([adjustment.added for adjustment in adjustments])
    indices = tuple(to_device(np.stack([np.concatenate(row_indices), ids]), logits_FV.device))
    device_factors, device_added = to_device(np.stack([factors, added]), logits_FV.device)
    selected = logits_FV[indices]
    scaled = torch.where(selected > 0, selected / device_factors, selected * device_factors)
    return logits_FV.index_put(indices, scaled + device_added)


def _race(logits_FV: Tensor, rows: Sequence[RowParams]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids_FK, weight_FK, time_FK and enough_F1 of the race between candidates.

    The candidate with the earliest time wins. Those cut by top-k or min-p weigh 0 and never arrive.
    Top-p keeps the heaviest candidates that weigh `enough` together.
    """
    size = logits_FV.shape[1]
    params = [row.params for row in rows]
    key_halves_F2 = np.array([row.key_halves for row in rows], dtype=np.uint32).view(np.int32)
    top_k_F = [min(row_params.top_k or size, size) for row_params in params]
    settings_F3 = [
        (
            math.nan if row_params.greedy else 1 / row_params.temperature,
            row_params.min_p,
            row_params.top_p,
        )
        for row_params in params
    ]
    # One transfer for six columns.
    table_F6 = to_device(np.column_stack([key_halves_F2, top_k_F, settings_F3]), logits_FV.device)
    before_F1, between_F1, top_k_F1, scale_F1, min_p_F1, top_p_F1 = torch.split(table_F6, 1, 1)
    max_top_k = max(
        top_k for top_k, row_params in zip(top_k_F, params, strict=True) if not row_params.greedy
    )
    if max_top_k + MAX_TIES < size:
        logits_FK, ids_FK = logits_FV.topk(max_top_k + MAX_TIES)
    else:
        logits_FK = logits_FV
        ids_FK = torch.arange(size, device=logits_FV.device)[None]
    weight_FK = (logits_FK - logits_FK.amax(1, keepdim=True)).mul_(scale_F1.float()).exp_()
    min_weight_F1 = min_p_F1.float()
    cut_sizes = [min(top_k, max_top_k) for top_k in top_k_F if top_k < size]
    if max(cut_sizes, default=0) > 0:
        last_weight_F1 = _last_of_top_k(weight_FK, top_k_F1.long(), max(cut_sizes))
        cut_weight_F1 = torch.maximum(min_weight_F1, last_weight_F1)
        min_weight_F1 = torch.where(top_k_F1 < size, cut_weight_F1, min_weight_F1)
    weight_FK = torch.where(weight_FK >= min_weight_F1, weight_FK, 0)
    time_FK = _exponentials(ids_FK.int(), before_F1.int(), between_F1.int()).div_(weight_FK)
    total_F1 = weight_FK.sum(1, keepdim=True, dtype=torch.float64)
    has_top_p_F1 = (top_p_F1 < 1) & (total_F1 > 0)
    enough_F1 = torch.where(has_top_p_F1, top_p_F1 * total_F1, torch.inf)
    return ids_FK, weight_FK, time_FK, enough_F1


def _last_of_top_k(weight_FK: Tensor, top_k_F1: Tensor, max_top_k: int) -> Tensor:
    """Return the weight of the last token in each row's top-k, cut to `max_top_k`."""
    last_F1 = top_k_F1.clamp(max=max_top_k) - 1
    return weight_FK.topk(max_top_k).values.gather(1, last_F1)


def _exponentials(ids_FK: Tensor, before_F1: Tensor, between_F1: Tensor) -> Tensor:
    """Return exponential noise, float32, from the hash of `sampler.hashes`.

    Products of int32 wrap around. A shift to the right copies the sign bit; the mask clears it.
    """
    hash_FK = ids_FK * _signed(ID_FACTOR) + before_F1
    hash_FK ^= (hash_FK >> 16) & 0xFFFF
    hash_FK *= _signed(FIRST_FACTOR)
    hash_FK ^= between_F1
    hash_FK ^= (hash_FK >> 15) & 0x1FFFF
    hash_FK *= _signed(SECOND_FACTOR)
    hash_FK ^= (hash_FK >> 16) & 0xFFFF
    # The smaller one of u and 1 - u: float32 holds it without loss of digits.
    small_FK = ((hash_FK ^ (hash_FK >> 31)).float() + 0.5) * UNIT
    return torch.where(hash_FK < 0, -small_FK.log(), -torch.log1p(-small_FK))


def _signed(factor: int) -> int:
    """Return the int32 with the bits of an unsigned `factor`."""
    return factor - 2**32 if factor >= 2**31 else factor
