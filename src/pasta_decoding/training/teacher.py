"""Keeping how a model writes while it learns when to write tags and when to end.

What a model learns from rows, its own answers even, changes its text, too. In rows that are kept
only tags and ends are learnt; all other tokens stay as likely, among themselves, as a frozen
teacher has them there (learning without forgetting, Li and Hoiem 2016; distillation, Hinton et al.
2015).

Shapes: L labelled places, K those of kept rows, V vocabulary, C tokens that write a tag or end the
answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from pasta_decoding.lang.layout import Layout
from pasta_decoding.models.control_tokens import ControlTokens

STAKES = 4.0
"""How much more a place weighs where there is a tag: there are few among many of text."""


@dataclass(frozen=True, slots=True)
class KeptLayout(Layout):
    """An answer that teaches its tags and its ends; its text says where the teacher is asked."""


def keeping_text(layouts: Iterable[Layout]) -> list[KeptLayout]:
    """Return the layouts as ones that teach tags and ends alone."""
    names = [field.name for field in fields(Layout)]
    return [KeptLayout(*(getattr(one, name) for name in names)) for one in layouts]


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be learnt at the labels of kept rows of one pack.

    at_K:       int64, index in L of these labels.
    targets_KV: float32, probabilities.
    weight_K:   float32, how much each counts.
    """

    at_K: Tensor
    targets_KV: Tensor
    weight_K: Tensor


@dataclass(frozen=True, slots=True)
class TextTeacher:
    """A frozen model whose text is kept.

    chosen_C: see `chosen_tokens`.
    """

    model: Any
    chosen_C: Tensor

    @torch.no_grad()
    def ask(self, inputs: dict[str, Any], label_L: Tensor, kept_L: Tensor) -> Kept:
        """Return what to learn in one pack, of which `kept_L` (bool) says the labels."""
        at_K = kept_L.nonzero()[:, 0]
        logits_KV = self.model.eval()(**inputs).logits[0][at_K].float()
        chosen_C = self.chosen_C.to(logits_KV.device)
        label_K = label_L[at_K]
        weight_K = 1 + STAKES * torch.isin(label_K, chosen_C).float()
        return Kept(at_K, targets(logits_KV, label_K, chosen_C), weight_K)


def chosen_tokens(control: ControlTokens, end: int) -> Tensor:
    """Return the ids of the control tokens that a model chooses; where a chunk begins is forced.

    Where a chunk ends is among them: a model that knows how long it promised to write ends it
    there. So is `end`, of the answer: behind its chunks it ends, or waits for them and goes on.
    """
    return torch.tensor(sorted(control.ids - {control.async_open} | {end}))


def targets(logits_KV: Tensor, label_K: Tensor, chosen_C: Tensor) -> Tensor:
    """Return probabilities: 1 for a label of `chosen_C`; where it is text, the teacher's text.

    There the tokens of `chosen_C` have none, and all others the share that `logits_KV` say.
    """
    label_KC = (label_K[:, None] == chosen_C).float()
    text_KV = softmax(logits_KV.index_fill(1, chosen_C, float("-inf")), dim=-1)
    text_KV = text_KV * (1 - label_KC.sum(dim=-1, keepdim=True))
    return text_KV.index_copy(1, chosen_C, label_KC)


def distance(logits_KV: Tensor, kept: Kept) -> Tensor:
    """Return KL(targets || model) in nats, [K], each place with its weight."""
    log_KV = log_softmax(logits_KV, dim=-1)
    return kl_div(log_KV, kept.targets_KV, reduction="none").sum(dim=-1) * kept.weight_K
