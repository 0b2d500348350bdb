"""Log-probabilities of laid-out answers, and the loss of stage 1.

Shapes: L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.view import model_inputs, pack, packed_batch, takes_blocks

IGNORED = -100
"""The label of a place where nothing is to be predicted, as torch and transformers have it."""


def logprobs_of(outputs: Any, label_L: Tensor) -> Tensor:
    """Return the log-probability of every label (nats), in float32 at least."""
    logits_LV = outputs.logits[0]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    return -cross_entropy(logits_LV, label_L, reduction="none")


def label_logprobs(model: Any, layouts: Sequence[Layout]) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats, float32).

    Forced tokens have no label and so no entry. Gradients flow where they are enabled.
    """
    batch = packed_batch(layouts).to(model.device)
    windows = attention_windows(model.config.get_text_config())
    outputs = model(**model_inputs(batch, windows, blocks=takes_blocks(model)))
    labels = [sum(label is not None for label in layout.label) for layout in layouts]
    return list(torch.split(logprobs_of(outputs, batch.label_L), labels))


def score_layouts(
    model: Any, layouts: Sequence[Layout], *, pack_tokens: int = 1024
) -> Iterator[Tensor]:
    """Yield `label_logprobs` of each layout in order, many in one forward pass, no gradients."""
    for together in pack(layouts, pack_tokens):
        with torch.inference_mode():
            scored = label_logprobs(model, together)
        yield from (logprobs_L.cpu() for logprobs_L in scored)


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
        """Return the mean of text, of control and of all labels (`loss`), and start anew.

        The means are over all processes, which must read together; they talk through `device`.
        """
        from accelerate.utils import reduce

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
