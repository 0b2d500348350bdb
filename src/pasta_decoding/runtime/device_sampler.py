"""`sampler.sampled`, for all rows of a step at once, on the device that holds the logits.

The noise is the same, so the tokens are, but for near-ties; chosen ids alone leave the device.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.runtime.sampler import (
    FIRST_FACTOR,
    ID_FACTOR,
    SECOND_FACTOR,
    UNIT,
    RowParams,
)

TURNS = 4
"""Cuts by top-p between two looks at whether all rows have their token: a look waits."""
_MASK = 2**32 - 1


@torch.inference_mode()
def sampled_rows(logits_FV: Tensor, rows: Sequence[RowParams]) -> list[int]:
    """Return the token that wins in each row."""
    logits_FV = _adjusted(logits_FV, rows)
    tokens_F = logits_FV.argmax(1)
    racing = [place for place, row in enumerate(rows) if not row.params.greedy]
    if racing:
        places = torch.tensor(racing, device=logits_FV.device)
        chosen = [rows[place] for place in racing]
        found_F = _winners(_weights(logits_FV[places], chosen), chosen)
        # A row without a number in it has no winner: it keeps what argmax makes of it.
        tokens_F[places] = torch.where(found_F < 0, tokens_F[places], found_F)
    return [int(token) for token in tokens_F.tolist()]


def _adjusted(logits_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """As `Adjustment.apply`; what is given stays as it is."""
    changed = [(place, row.adjustment) for place, row in enumerate(rows) if row.adjustment]
    if not changed:
        return logits_FV
    device = logits_FV.device
    places = np.concatenate([np.full(len(one.ids), place) for place, one in changed])
    ids = np.concatenate([one.ids for _, one in changed])
    where = (torch.from_numpy(places).to(device), torch.from_numpy(ids).to(device))
    factors = torch.from_numpy(np.concatenate([one.factors for _, one in changed])).to(device)
    added = torch.from_numpy(np.concatenate([one.added for _, one in changed])).to(device)
    found = logits_FV[where]
    scaled = torch.where(found > 0, found / factors, found * factors)
    return logits_FV.index_put(where, scaled + added)


def _weights(logits_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """As `sampler.weights`."""
    scale_F = _column([1 / row.params.temperature for row in rows], logits_FV)
    weight_FV = ((logits_FV - logits_FV.amax(1, keepdim=True)) * scale_F).exp()
    least_F = _column([row.params.min_p for row in rows], logits_FV)
    size = weight_FV.shape[1]
    kept = [min(row.params.top_k or size, size) for row in rows]
    if min(kept) < size:
        largest = max(k for k in kept if k < size)
        sorted_FK = weight_FV.topk(largest, dim=1).values
        last = torch.tensor([[min(k, largest) - 1] for k in kept], device=weight_FV.device)
        cut_F = torch.tensor([[k < size] for k in kept], device=weight_FV.device)
        least_F = torch.where(cut_F, torch.maximum(least_F, sorted_FK.gather(1, last)), least_F)
    return torch.where(weight_FV >= least_F, weight_FV, 0)


def _winners(weight_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """As `sampler.winner`; -1 where there is none."""
    time_FV = _exponentials(rows, weight_FV) / weight_FV
    token_F = time_FV.argmin(1, keepdim=True)
    top_p = [[row.params.top_p] for row in rows]
    enough_F = torch.tensor(top_p, dtype=torch.float64).to(weight_FV.device)
    enough_F = torch.where(enough_F < 1, enough_F, torch.inf)
    enough_F = enough_F * weight_FV.sum(1, keepdim=True, dtype=torch.float64)
    while min(top_p) < [1]:
        for _ in range(TURNS):
            heavier_FV = weight_FV > weight_FV.gather(1, token_F)
            heavier_F = (weight_FV * heavier_FV).sum(1, keepdim=True, dtype=torch.float64)
            out_F = heavier_F >= enough_F
            time_FV = torch.where(out_F & ~heavier_FV, torch.inf, time_FV)
            token_F = time_FV.argmin(1, keepdim=True)
        if not bool(out_F.any()):
            break
    return torch.where(time_FV.gather(1, token_F).isfinite(), token_F, -1)[:, 0]


def _exponentials(rows: Sequence[RowParams], beside: Tensor) -> Tensor:
    """As `sampler.hashes`, and the times that follow from them."""
    halves = torch.tensor([row.key_halves for row in rows], device=beside.device)
    ids = torch.arange(beside.shape[1], device=beside.device)
    hash_FV = (ids * ID_FACTOR + halves[:, :1]) & _MASK
    hash_FV ^= hash_FV >> 16
    hash_FV = (hash_FV * FIRST_FACTOR & _MASK) ^ halves[:, 1:]
    hash_FV ^= hash_FV >> 15
    hash_FV = hash_FV * SECOND_FACTOR & _MASK
    hash_FV ^= hash_FV >> 16
    return -torch.log1p((hash_FV.double() + 0.5) * -UNIT)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
