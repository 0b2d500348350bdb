"""`sampler.sampled`, for all rows of a step at once, on the device that holds the logits.

The noise is the same, so the tokens are, but for near-ties; chosen ids alone leave the device.
Nothing is waited for but them.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
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
"""Cuts by top-p before tokens are fetched; with them comes whether some row needs more."""


@torch.inference_mode()
def sampled_rows(logits_FV: Tensor, rows: Sequence[RowParams]) -> list[int]:
    """Return the token that wins in each row."""
    logits_FV = _adjusted(logits_FV, rows)
    tokens_F = logits_FV.argmax(1)
    racing = [place for place, row in enumerate(rows) if not row.params.greedy]
    if not racing:
        return [int(token) for token in tokens_F.tolist()]
    places_F = _sent(np.array(racing), logits_FV.device)
    racing_FV = logits_FV if len(racing) == len(rows) else logits_FV[places_F]
    for found_F, unsettled in _winners(racing_FV, [rows[place] for place in racing]):
        # A row without a number in it has no winner: it keeps what argmax makes of it.
        won_F = torch.where(found_F < 0, tokens_F[places_F], found_F)
        fetched = torch.cat([tokens_F.index_copy(0, places_F, won_F), unsettled.long()[None]])
        *tokens, more = fetched.tolist()
        if not more:
            break
    return tokens


def _adjusted(logits_FV: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """As `Adjustment.apply`; what is given stays as it is."""
    changed = [(place, row.adjustment) for place, row in enumerate(rows) if row.adjustment]
    if not changed:
        return logits_FV
    places = np.concatenate([np.full(len(one.ids), place) for place, one in changed])
    ids = np.concatenate([one.ids for _, one in changed])
    numbers = np.concatenate([(one.factors, one.added) for _, one in changed], axis=1)
    where = tuple(_sent(np.stack([places, ids]), logits_FV.device))
    factors, added = _sent(numbers, logits_FV.device)
    found = logits_FV[where]
    scaled = torch.where(found > 0, found / factors, found * factors)
    return logits_FV.index_put(where, scaled + added)


def _winners(logits_FV: Tensor, rows: Sequence[RowParams]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield as `sampler.winner`, -1 where there is none, and whether a later yield may differ."""
    size, params = logits_FV.shape[1], [row.params for row in rows]
    halves_F2 = np.array([row.key_halves for row in rows], dtype=np.uint32).view(np.int32)
    kept = [min(one.top_k or size, size) for one in params]
    columns = [[1 / one.temperature, one.min_p, one.top_p] for one in params]
    table_F6 = np.column_stack([halves_F2, kept, columns])
    before_F, between_F, kept_F, scale_F, least_F, top_p_F = (
        _sent(table_F6, logits_FV.device).mT[..., None].unbind()
    )
    weight_FV = (logits_FV - logits_FV.amax(1, keepdim=True)).mul_(scale_F.float()).exp_()
    least_F = least_F.float()
    if (largest := max([k for k in kept if k < size], default=0)) > 0:
        sorted_FK = weight_FV.topk(largest, dim=1).values
        last_F = sorted_FK.gather(1, kept_F.long().clamp(max=largest) - 1)
        least_F = torch.where(kept_F < size, torch.maximum(least_F, last_F), least_F)
    if largest or any(one.min_p > 0 for one in params):
        weight_FV = torch.where(weight_FV >= least_F, weight_FV, 0)
    time_FV = _exponentials(size, before_F.int(), between_F.int()).div_(weight_FV)
    token_F = time_FV.argmin(1, keepdim=True)
    enough_F = torch.where(top_p_F < 1, top_p_F, torch.inf)
    enough_F = enough_F * weight_FV.sum(1, keepdim=True, dtype=torch.float64)
    turns = TURNS if min(one.top_p for one in params) < 1 else 0
    while True:
        out_F = torch.zeros_like(enough_F, dtype=torch.bool)
        for _ in range(turns):
            heavier_FV = weight_FV > weight_FV.gather(1, token_F)
            heavier_F = (weight_FV * heavier_FV).sum(1, keepdim=True, dtype=torch.float64)
            out_F = heavier_F >= enough_F
            time_FV.masked_fill_(out_F & ~heavier_FV, torch.inf)
            token_F = time_FV.argmin(1, keepdim=True)
        finite_F = time_FV.gather(1, token_F).isfinite()
        yield torch.where(finite_F, token_F, -1)[:, 0], out_F.any()


def _exponentials(size: int, before_F: Tensor, between_F: Tensor) -> Tensor:
    """As `sampler.hashes`, and the times that follow from them, float32.

    Products of int32 wrap around; a shift keeps the sign, which a mask takes away.
    """
    ids_V = torch.arange(size, device=before_F.device, dtype=torch.int32)
    hash_FV = ids_V * _signed(ID_FACTOR) + before_F
    hash_FV ^= (hash_FV >> 16) & 0xFFFF
    hash_FV *= _signed(FIRST_FACTOR)
    hash_FV ^= between_F
    hash_FV ^= (hash_FV >> 15) & 0x1FFFF
    hash_FV *= _signed(SECOND_FACTOR)
    hash_FV ^= (hash_FV >> 16) & 0xFFFF
    # Of u and 1 - u the smaller one, which float32 has exactly enough.
    small_FV = ((hash_FV ^ (hash_FV >> 31)).float() + 0.5) * UNIT
    return torch.where(hash_FV < 0, -small_FV.log(), -torch.log1p(-small_FV))


def _signed(factor: int) -> int:
    """Return a number of 32 bits as int32 has it."""
    return factor - 2**32 if factor >= 2**31 else factor


def _sent(numbers: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy to the device without waiting for what it does."""
    held = torch.from_numpy(numbers)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held
