"""Constraints applied to logits, many rows at once. Shapes: R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.runtime.constraints import Constraint

GREEDY_BELOW = 1e-5
"""Under this temperature vLLM takes the likeliest."""
Row = tuple[int, Constraint | None, float]
"""Which one, what may stand there if that is known, and the temperature at which it is drawn."""


class Mask:
    """Restricts the logits of one step after the other, of which most forbid the same."""

    def __init__(self) -> None:
        self._banned: list[tuple[int, Constraint]] = []
        self._places: tuple[Tensor, Tensor] | None = None

    def restrict(self, logits_RV: Tensor, rows: Sequence[Row]) -> None:
        """Change `logits_RV` in place, so that what is drawn from it is what may stand there."""
        banned: list[tuple[int, Constraint]] = []
        for row, allowed, temperature in rows:
            if allowed is None:
                continue
            for token, by in allowed.bias.items():
                logits_RV[row, token] += by
            if allowed.only is not None:
                _keep(logits_RV[row], allowed.only)
            elif allowed.instead is not None:
                _lift(logits_RV[row], allowed.banned, allowed.instead, temperature)
            if len(allowed.banned):
                banned.append((row, allowed))
        if banned:
            logits_RV.index_put_(self._found(banned, logits_RV), logits_RV.new_tensor(-torch.inf))

    def _found(self, banned: list[tuple[int, Constraint]], beside: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and ids of all that is banned; those of the step before if they are these."""
        if self._places is None or not _alike(banned, self._banned):
            which = np.repeat([row for row, _ in banned], [len(one.banned) for _, one in banned])
            ids = np.concatenate([one.banned for _, one in banned])
            self._banned, self._places = banned, (_tensor(which, beside), _tensor(ids, beside))
        return self._places


def _alike(these: list[tuple[int, Constraint]], those: list[tuple[int, Constraint]]) -> bool:
    return len(these) == len(those) and all(
        row == other and one is two for (row, one), (other, two) in zip(these, those, strict=True)
    )


def _keep(logits_V: Tensor, only: Any) -> None:
    ids = _tensor(only, logits_V)
    kept = logits_V[ids]
    logits_V.fill_(-torch.inf)
    logits_V[ids] = kept


def _lift(logits_V: Tensor, banned: Any, instead: Any, temperature: float) -> None:
    """Give `instead` all of the probability that `banned` has; it loses that elsewhere.

    So who wants a banned token chooses among these, and who wants another one has it.
    """
    lost, ids = logits_V[_tensor(banned, logits_V)], _tensor(instead, logits_V)
    if temperature < GREEDY_BELOW:
        logits_V[ids] += torch.relu(lost.max() - logits_V[ids].max())
        return
    ratio = (lost / temperature).logsumexp(0) - (logits_V[ids] / temperature).logsumexp(0)
    logits_V[ids] += temperature * torch.nn.functional.softplus(ratio)


def _tensor(ids: Any, beside: Tensor) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device=beside.device)
