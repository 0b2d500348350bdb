"""The loss of stage 1, and its two parts as a reader of the curve wants them.

Shapes: L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""The label of a place where nothing is to be predicted, as torch and transformers have it."""


class LossMeter:
    """Cross entropy in nats per labelled token, with the control tokens' share kept apart.

    finite: whether every loss so far was a number.
    last:   mean over the labels of the last pack that had any, of this process.
    """

    def __init__(self, control_ids: Collection[int]) -> None:
        self._control_C = torch.tensor(sorted(control_ids))
        # Sums of nats and numbers of labels, of text and control tokens.
        self._totals = torch.zeros(2, 2, dtype=torch.float64)
        self.finite = True
        self.last: float | None = None

    def loss(
        self,
        outputs: Any,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the summed loss of one pack over the labels of its whole optimiser step."""
        label_L = labels[labels != IGNORED]
        nats_L = cross_entropy(outputs.logits[0].float(), label_L, reduction="none")
        self._count(nats_L.detach(), label_L)
        items = label_L.numel() if num_items_in_batch is None else num_items_in_batch
        return nats_L.sum() / items

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the mean of text and control labels since the last reading, and start anew.

        The means are over all processes, which must read together; they talk through `device`.
        """
        return {name: mean for name, mean in self.read_all(device).items() if name != "loss"}

    def read_all(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the same, and the mean over all labels as `loss`."""
        totals = reduce(self._totals.to(device), "sum")
        self._totals.zero_()
        sums = torch.cat([totals, totals.sum(dim=0, keepdim=True)]).tolist()
        names = ("text_loss", "control_loss", "loss")
        return {
            name: nats / labels for name, (nats, labels) in zip(names, sums, strict=True) if labels
        }

    def _count(self, nats_L: Tensor, label_L: Tensor) -> None:
        control_L = torch.isin(label_L, self._control_C.to(label_L.device))
        for part, chosen_L in enumerate((~control_L, control_L)):
            self._totals[part, 0] += nats_L[chosen_L].double().sum().cpu()
            self._totals[part, 1] += int(chosen_L.sum())
        self.finite = self.finite and bool(self._totals.isfinite().all())
        if len(label_L):
            self.last = float(nats_L.mean())
