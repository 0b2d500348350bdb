"""Log-probabilities of laid-out answers, the loss of stage 1, and what collects figures.

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


class Meter:
    """Means of named figures since the last reading, over all processes."""

    def __init__(self, *names: str) -> None:
        self._sums = {name: torch.zeros(2, dtype=torch.float64) for name in names}

    def add(self, **values: Tensor) -> None:
        """Count each element of these tensors."""
        for name, value in values.items():
            count = torch.tensor(value.numel())
            self._sums[name] += torch.stack([value.detach().double().sum().cpu(), count])

    @property
    def finite(self) -> bool:
        """Are all figures numbers?"""
        return all(bool(sums.isfinite().all()) for sums in self._sums.values())

    def read(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the means, and start anew. All processes read together, through `device`."""
        from accelerate.utils import reduce

        sums = reduce(torch.stack([*self._sums.values()]).to(device), "sum").tolist()
        self._sums = {name: torch.zeros(2, dtype=torch.float64) for name in self._sums}
        means = zip(self._sums, sums, strict=True)
        return {name: total / count for name, (total, count) in means if count}


class LabelLoss:
    """Cross entropy in nats per labelled token; the control tokens' share is metered apart."""

    def __init__(self, control_ids: Collection[int]) -> None:
        self._control_C = torch.tensor(sorted(control_ids))
        self.meter = Meter("text_loss", "control_loss", "loss")

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the summed loss of one pack over the labels of its whole optimiser step."""
        label_L = labels[labels != IGNORED]
        nats_L = -logprobs_of(outputs, label_L)
        control_L = torch.isin(label_L, self._control_C.to(label_L.device))
        self.meter.add(text_loss=nats_L[~control_L], control_loss=nats_L[control_L], loss=nats_L)
        return nats_L.sum() / (len(label_L) if num_items_in_batch is None else num_items_in_batch)
