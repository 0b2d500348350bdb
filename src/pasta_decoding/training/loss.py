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

from pasta_decoding.training.teacher import Kept, distance

IGNORED = -100
"""The label of a place where nothing is to be predicted, as torch and transformers have it."""
DECAY = 0.5
"""How likely a token should be, of how likely it was one repetition earlier (Xu et al., 2022)."""


class LossMeter:
    """Cross entropy in nats per labelled token, with the control tokens' share kept apart.

    Where a label repeats an earlier one, what is lost is the distance from the probability that it
    should have (`DECAY`), as -ln(1 - distance); its share is kept apart, too. In rows that teach
    their tags alone it is the distance from what a teacher of text says (`teacher.py`).

    finite: whether every loss so far was a number.
    last:   mean over the labels of the last pack that had any, of this process.
    """

    def __init__(self, control_ids: Collection[int]) -> None:
        self._control_C = torch.tensor(sorted(control_ids))
        # Sums of nats and numbers of labels, of text, control tokens and what is repeated.
        self._totals = torch.zeros(3, 2, dtype=torch.float64)
        self.finite = True
        self.last: float | None = None

    def loss(
        self,
        outputs: Any,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        *,
        again_L: Tensor | None = None,
        kept: Kept | None = None,
    ) -> Tensor:
        """Return the summed loss of one pack over the labels of its whole optimiser step.

        again_L: as in `View`; None where nothing is repeated.
        kept:    None where all rows are learnt as they stand.
        """
        label_L = labels[labels != IGNORED]
        logits_LV = outputs.logits[0].float()
        nats_L = cross_entropy(logits_LV, label_L, reduction="none")
        if again_L is None:
            again_L = torch.full_like(label_L, -1)
        repeated_L = again_L >= 0
        if bool(repeated_L.any()):
            nats_L = torch.where(repeated_L, _loop_loss(nats_L, again_L), nats_L)
        if kept is not None:
            nats_L = nats_L.index_copy(0, kept.at_K, distance(logits_LV[kept.at_K], kept))
        self._count(nats_L.detach(), label_L, repeated_L)
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
        names = ("text_loss", "control_loss", "loop_loss", "loss")
        return {
            name: nats / labels for name, (nats, labels) in zip(names, sums, strict=True) if labels
        }

    def _count(self, nats_L: Tensor, label_L: Tensor, repeated_L: Tensor) -> None:
        control_L = torch.isin(label_L, self._control_C.to(label_L.device))
        parts = (~control_L & ~repeated_L, control_L & ~repeated_L, repeated_L)
        for part, chosen_L in enumerate(parts):
            self._totals[part, 0] += nats_L[chosen_L].double().sum().cpu()
            self._totals[part, 1] += int(chosen_L.sum())
        self.finite = self.finite and bool(self._totals.isfinite().all())
        if len(label_L):
            self.last = float(nats_L.mean())


def _loop_loss(nats_L: Tensor, again_L: Tensor) -> Tensor:
    """Return -ln(1 - |p - DECAY p'|), with p' the probability of the label that is repeated.

    No gradient flows into p'. Entries that repeat nothing are to be passed over.
    """
    p_L = torch.exp(-nats_L)
    distance_L = (p_L - DECAY * p_L.detach()[again_L]).abs()
    return -torch.log1p(-distance_L.clamp(max=1 - 1e-5))
