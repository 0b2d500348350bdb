"""Two teachers: when to write a tag, and which, is learnt from one, all text from the other.

So a model comes to write the tags of an adapter in the words of another (distillation, Hinton et
al. 2015; keeping what is there, Li and Hoiem 2016). The rows only say where the teachers are asked:
what they answer is learnt, not what stands in the rows.

Shapes: L labelled places, V vocabulary, C tokens that write a tag or end the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from pasta_decoding.models.control_tokens import ControlTokens

STAKES = 4.0
"""How much more a place weighs where a tag is certain: there are few among many of text."""


@dataclass(frozen=True, slots=True)
class Teachers:
    """Frozen models of one base: whose text is learnt, and whose tags.

    chosen_C: see `chosen_tokens`.
    """

    text: Any
    tags: Any
    chosen_C: Tensor

    @torch.no_grad()
    def targets(self, inputs: dict[str, Any]) -> Tensor:
        """Return the probabilities to learn, [L, V] in float32, at the labels of one pack."""
        text_LV, tags_LV = (
            model(**inputs).logits[0].float() for model in (self.text.eval(), self.tags.eval())
        )
        return mixed(text_LV, tags_LV, self.chosen_C.to(text_LV.device))


def chosen_tokens(control: ControlTokens, end: int) -> Tensor:
    """Return the ids of the control tokens that a model chooses; where a chunk begins is forced.

    Where a chunk ends is among them: an adapter that knows how long it promised to write ends it
    there. So is `end`, of the answer: behind its chunks it ends, or waits for them and goes on.
    """
    return torch.tensor(sorted(control.ids - {control.async_open} | {end}))


def mixed(text_LV: Tensor, tags_LV: Tensor, chosen_C: Tensor) -> Tensor:
    """Return probabilities: of `chosen_C` by the logits `tags_LV`, the rest shared out as text is.

    Among the other tokens each has its share by the logits `text_LV`.
    """
    chosen_LC = softmax(tags_LV, dim=-1)[:, chosen_C]
    text_LV = softmax(text_LV.index_fill(1, chosen_C, float("-inf")), dim=-1)
    targets_LV = text_LV * (1 - chosen_LC.sum(dim=-1, keepdim=True))
    return targets_LV.index_copy(1, chosen_C, chosen_LC)


def distance(logits_LV: Tensor, targets_LV: Tensor, chosen_C: Tensor) -> Tensor:
    """Return KL(targets || model) in nats, [L], each place with its weight."""
    nats_L = kl_div(log_softmax(logits_LV, dim=-1), targets_LV, reduction="none").sum(dim=-1)
    stakes_L = targets_LV[:, chosen_C].sum(dim=-1)
    return nats_L * (1 + STAKES * stakes_L)
