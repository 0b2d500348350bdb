"""The loss of stage 1, and its two parts as a reader of the curve wants them.

Shapes: L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class LossMeter:
    """Cross entropy in nats per labelled token, with the control tokens' share kept apart."""

    def __init__(self, control_ids: Collection[int]) -> None:
        self._control_C = torch.tensor(sorted(control_ids))
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._counts = torch.zeros(2, dtype=torch.float64)

    def loss(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the summed loss of one pack over the labels of its whole optimiser step."""
        label_L = labels.flatten()
        logits_LV = outputs.logits[0].float()
        nats_L = cross_entropy(logits_LV, label_L, reduction="none")
        self._count(nats_L.detach(), label_L)
        items = label_L.numel() if num_items_in_batch is None else num_items_in_batch
        return nats_L.sum() / items

    def read(self) -> dict[str, float]:
        """Return the mean of text and control labels since the last reading, and start anew."""
        names = ("text_loss", "control_loss")
        means = {
            name: float(total / count)
            for name, total, count in zip(names, self._sums, self._counts, strict=True)
            if count
        }
        self._sums.zero_()
        self._counts.zero_()
        return means

    def _count(self, nats_L: Tensor, label_L: Tensor) -> None:
        control_L = torch.isin(label_L, self._control_C.to(label_L.device))
        for part, chosen_L in enumerate((~control_L, control_L)):
            self._sums[part] += nats_L[chosen_L].double().sum().cpu()
            self._counts[part] += int(chosen_L.sum())
