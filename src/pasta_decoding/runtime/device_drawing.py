"""The draws of `drawing`, for all rows of a step in one pass on the device that holds the logits.

What is adjusted and drawn is the same, up to rounding; the chosen ids alone leave the device.

Shapes: F rows, V vocabulary, B blocks of it, N tokens of a block, T turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pasta_decoding.runtime.drawing import BLOCK, uniforms
from pasta_decoding.runtime.sampling import Draw

TURNS = 4
"""Draws between two looks at whether all rows have their token: a look waits for the device."""


@torch.inference_mode()
def draw_rows(logits_FV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Return the token that each draw takes from its row."""
    logits_FV = _adjusted(logits_FV, draws)
    tokens_F = logits_FV.argmax(1)
    sampled = [row for row, draw in enumerate(draws) if not draw.greedy]
    if sampled:
        rows = torch.tensor(sampled, device=logits_FV.device)
        chosen = [draws[row] for row in sampled]
        found_F = _sample(_weights(logits_FV[rows], chosen), chosen)
        # A row without a number in it has no draw: it keeps what argmax makes of it.
        tokens_F[rows] = torch.where(found_F < 0, tokens_F[rows], found_F)
    return [int(token) for token in tokens_F.tolist()]


def _adjusted(logits_FV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """See `Adjustment.apply`; what is given stays as it is."""
    changed = [(row, draw.adjustment) for row, draw in enumerate(draws) if draw.adjustment]
    if not changed:
        return logits_FV
    device = logits_FV.device
    rows = np.concatenate([np.full(len(one.ids), row) for row, one in changed])
    place = tuple(
        torch.from_numpy(ids).to(device)
        for ids in (rows, np.concatenate([one.ids for _, one in changed]))
    )
    factors = torch.from_numpy(np.concatenate([one.factors for _, one in changed])).to(device)
    added = torch.from_numpy(np.concatenate([one.added for _, one in changed])).to(device)
    found = logits_FV[place]
    scaled = torch.where(found > 0, found / factors, found * factors)
    return logits_FV.index_put(place, scaled + added)


def _weights(logits_FV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """See `drawing.weights`."""
    scale_F = _column([1 / draw.temperature for draw in draws], logits_FV)
    weight_FV = ((logits_FV - logits_FV.amax(1, keepdim=True)) * scale_F).exp()
    least_F = _column([draw.cut.min_p for draw in draws], logits_FV)
    most = weight_FV.shape[1]
    kept = [min(draw.cut.top_k or most, most) for draw in draws]
    if min(kept) < most:
        largest = max(k for k in kept if k < most)
        sorted_FK = weight_FV.topk(largest, dim=1).values
        last = torch.tensor([[min(k, largest) - 1] for k in kept], device=weight_FV.device)
        cut_F = torch.tensor([[k < most] for k in kept], device=weight_FV.device)
        least_F = torch.where(cut_F, torch.maximum(least_F, sorted_FK.gather(1, last)), least_F)
    return torch.where(weight_FV >= least_F, weight_FV, 0)


def _sample(weight_FV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """See `drawing.draw`. A row without any weight gets -1."""
    weight_FV = pad(weight_FV, (0, -weight_FV.shape[1] % BLOCK))
    top_p_F = torch.tensor([[draw.cut.top_p] for draw in draws], dtype=torch.float64)
    top_p_F = top_p_F.to(weight_FV.device)
    total_F = weight_FV.sum(1, keepdim=True, dtype=torch.float64)
    noise = [uniforms(*draw.key) for draw in draws]
    pool_FV, done_F = weight_FV, ~(total_F > 0)
    token_F = torch.full_like(total_F, -1, dtype=torch.long)
    while True:
        uniform_FT = torch.tensor([list(islice(row, TURNS)) for row in noise], dtype=torch.float64)
        uniform_FT = uniform_FT.to(weight_FV.device)
        for turn in range(TURNS):
            try_F = _pick(pool_FV, uniform_FT[:, turn : turn + 1])
            heavier_FV = weight_FV > weight_FV.gather(1, try_F)
            heavier_F = (weight_FV * heavier_FV).sum(1, keepdim=True, dtype=torch.float64)
            inside_F = (top_p_F == 1) | (heavier_F < top_p_F * total_F)
            fits_F = inside_F & (pool_FV.gather(1, try_F) > 0) & ~done_F
            token_F = torch.where(fits_F, try_F, token_F)
            done_F = done_F | fits_F
            pool_FV = pool_FV * heavier_FV
        if bool(done_F.all()):
            return token_F[:, 0]


def _pick(pool_FV: Tensor, uniform_F: Tensor) -> Tensor:
    """See `drawing.pick`."""
    pool_FBN = pool_FV.view(len(pool_FV), -1, BLOCK)
    ends_FB = pool_FBN.sum(2, dtype=torch.float64).cumsum(1)
    mark_F = uniform_F * ends_FB[:, -1:]
    block_F = torch.searchsorted(ends_FB, mark_F, right=True).clamp(max=ends_FB.shape[1] - 1)
    before_F = pad(ends_FB, (1, 0)).gather(1, block_F)
    own_FN = pool_FBN[torch.arange(len(pool_FBN), device=pool_FV.device), block_F[:, 0]]
    inside_FN = own_FN.cumsum(1, dtype=torch.float64)
    place_F = torch.searchsorted(inside_FN, mark_F - before_F, right=True).clamp(max=BLOCK - 1)
    return block_F * BLOCK + place_F


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
