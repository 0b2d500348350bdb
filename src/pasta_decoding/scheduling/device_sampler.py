"""`sampler.sample_token`, for all rows of a step at once, on the device that holds the logits.

The noise is the same, so the tokens are, but for near-ties; chosen ids alone leave the device.
Nothing is waited for but them.

Shapes: F rows, V vocabulary, K tokens that may win: where each row has a top-k, few.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.answer.sampler import FIRST_FACTOR, ID_FACTOR, SECOND_FACTOR, UNIT, RowParams
from pasta_decoding.engines.torch import to_device

TIES = 64
"""How many tokens more than top-k may win: those as likely as the last one, where so many are."""
TURNS = 4
"""Cuts by top-p before tokens are fetched; with them comes whether some row needs more."""


@torch.inference_mode()
def sample_tokens(logits_FV: Tensor, rows: Sequence[RowParams]) -> list[int]:
    """Return the token that wins in each row."""
    logits_FV = _adjusted(logits_FV, rows)
    best_F1 = logits_FV.argmax(1, keepdim=True)
    if all(row.params.greedy for row in rows):
        return [int(token) for token in best_F1.flatten().tolist()]
    ids_FK, weight_FK, time_FK, enough_F1 = _race(logits_FV, rows)
    place_F1 = time_FK.argmin(1, keepdim=True)
    out_F1 = torch.zeros_like(place_F1, dtype=torch.bool)
    turns = TURNS if min(row.params.top_p for row in rows) < 1 else 0
    more = True
    while more:
        for _ in range(turns):
            heavier_FK = weight_FK > weight_FK.gather(1, place_F1)
            heavier_F1 = (weight_FK * heavier_FK).sum(1, keepdim=True, dtype=torch.float64)
            out_F1 = heavier_F1 >= enough_F1
            time_FK.masked_fill_(out_F1 & ~heavier_FK, torch.inf)
            place_F1 = time_FK.argmin(1, keepdim=True)
        won_F1 = ids_FK.expand_as(time_FK).gather(1, place_F1)
        # Where nobody has a time, as in a greedy row, the likeliest is taken.
        won_F1 = torch.where(time_FK.gather(1, place_F1).isfinite(), won_F1, best_F1)
        *tokens, more = torch.cat([won_F1.flatten(), out_F1.any().long()[None]]).tolist()
    return tokens


def _adjusted(logits_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """As `Adjustment.apply`; what is given stays as it is."""
    changed = [(place, row.adjustment) for place, row in enumerate(rows) if row.adjustment]
    if not changed:
        return logits_FV
    places = np.concatenate([np.full(len(one.ids), place) for place, one in changed])
    ids = np.concatenate([one.ids for _, one in changed])
    numbers = np.concatenate([(one.factors, one.added) for _, one in changed], axis=1)
    where = tuple(to_device(np.stack([places, ids]), logits_FV.device))
    factors, added = to_device(numbers, logits_FV.device)
    found = logits_FV[where]
    scaled = torch.where(found > 0, found / factors, found * factors)
    return logits_FV.index_put(where, scaled + added)


def _race(logits_FV: Tensor, rows: Sequence[RowParams]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ids that may win, what they weigh, when they arrive, and what top-p keeps."""
    size, params = logits_FV.shape[1], [row.params for row in rows]
    halves_F2 = np.array([row.key_halves for row in rows], dtype=np.uint32).view(np.int32)
    kept = [min(one.top_k or size, size) for one in params]
    most = max(k for k, one in zip(kept, params, strict=True) if not one.greedy)
    columns = [
        (math.nan if one.greedy else 1 / one.temperature, one.min_p, one.top_p) for one in params
    ]
    # One transfer for six columns.
    table_F6 = to_device(np.column_stack([halves_F2, kept, columns]), logits_FV.device)
    before_F1, between_F1, kept_F1, scale_F1, min_p_F1, top_p_F1 = torch.split(table_F6, 1, 1)
    logits_FK, ids_FK = logits_FV, torch.arange(size, device=logits_FV.device)[None]
    if most + TIES < size:
        logits_FK, ids_FK = logits_FV.topk(most + TIES)
    weight_FK = (logits_FK - logits_FK.amax(1, keepdim=True)).mul_(scale_F1.float()).exp_()
    least_F1 = min_p_F1.float()
    if (largest := max([min(k, most) for k in kept if k < size], default=0)) > 0:
        last_F1 = _last_of_top_k(weight_FK, kept_F1.long(), largest)
        least_F1 = torch.where(kept_F1 < size, torch.maximum(least_F1, last_F1), least_F1)
    weight_FK = torch.where(weight_FK >= least_F1, weight_FK, 0)
    time_FK = _exponentials(ids_FK.int(), before_F1.int(), between_F1.int()).div_(weight_FK)
    total_F1 = weight_FK.sum(1, keepdim=True, dtype=torch.float64)
    cut_F1 = (top_p_F1 < 1) & (total_F1 > 0)
    return ids_FK, weight_FK, time_FK, torch.where(cut_F1, top_p_F1 * total_F1, torch.inf)


def _last_of_top_k(weight_FK: Tensor, kept_F1: Tensor, largest: int) -> Tensor:
    """Return the weight of each row's last token of its top-k, which is at most `largest`."""
    return weight_FK.topk(largest).values.gather(1, kept_F1.clamp(max=largest) - 1)


def _exponentials(ids_FK: Tensor, before_F1: Tensor, between_F1: Tensor) -> Tensor:
    """As `sampler.hashes`, and the times that follow from them, float32.

    Products of int32 wrap around; a shift keeps the sign, which a mask takes away.
    """
    hash_FK = ids_FK * _signed(ID_FACTOR) + before_F1
    hash_FK ^= (hash_FK >> 16) & 0xFFFF
    hash_FK *= _signed(FIRST_FACTOR)
    hash_FK ^= between_F1
    hash_FK ^= (hash_FK >> 15) & 0x1FFFF
    hash_FK *= _signed(SECOND_FACTOR)
    hash_FK ^= (hash_FK >> 16) & 0xFFFF
    # Of u and 1 - u the smaller one, which float32 has exactly enough.
    small_FK = ((hash_FK ^ (hash_FK >> 31)).float() + 0.5) * UNIT
    return torch.where(hash_FK < 0, -small_FK.log(), -torch.log1p(-small_FK))


def _signed(factor: int) -> int:
    """Return a number of 32 bits as int32 has it."""
    return factor - 2**32 if factor >= 2**31 else factor
