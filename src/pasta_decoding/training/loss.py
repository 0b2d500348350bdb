"""Log-probabilities of laid-out answers, and the loss of stage 1.

Shapes: L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.view import attention_masks, pack, packed_batch


@dataclass(frozen=True, slots=True)
class Example:
    """What one forward pass computes in training: answers that do not see each other.

    layouts:    a pack of stage 1; best and worst of a prompt in stage 2, or the best alone.
    scale:      stage 1: of the summed loss, so that the mean over the packs of a step is that over
                the labels of the step.
    candidates: stage 2: the N that best and worst were chosen from.
    reference:  stage 2: log-probabilities of both under the policy that sampled them, in nats.
    """

    layouts: Sequence[Layout]
    scale: float = 1.0
    candidates: int = 0
    reference: tuple[float, ...] = ()

    @property
    def labels(self) -> list[int]:
        return [label for one in self.layouts for label in one.label if label is not None]


Figures = dict[str, Tensor]
Loss = Callable[[Sequence[Tensor], Example], tuple[Tensor, Figures]]
"""Takes the log-probabilities of each layout of an example; returns its loss, and figures.

What is minimised is the mean over the examples of a step. The metrics have the figures' means.
"""


def label_logprobs(model: Any, layouts: Sequence[Layout], call: Any = None) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats).

    Forced tokens have no label and so no entry. They are computed in float32 at least. Gradients
    flow where they are enabled.
    call: what computes the forward: `model`, or what accelerate wrapped it in.
    """
    # cuDNN's attention is torch's first choice on Hopper GPUs. With these masks a run of it came to
    # a loss of NaN, and two runs without it did not; why is not known.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with model.device:
        batch = packed_batch(layouts)
    outputs = (call or model)(
        input_ids=batch.tokens_T[None],
        position_ids=batch.position_T[None],
        attention_mask=attention_masks(batch, attention_windows(model.config.get_text_config())),
        logits_to_keep=batch.source_L,
        use_cache=False,
    )
    logits_LV = outputs.logits[0]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    logprobs_L = -cross_entropy(logits_LV, batch.label_L, reduction="none")
    labels = [sum(label is not None for label in layout.label) for layout in layouts]
    return list(torch.split(logprobs_L, labels))


def score_layouts(
    model: Any, layouts: Sequence[Layout], *, pack_tokens: int | None = None
) -> Iterator[Tensor]:
    """Yield `label_logprobs` of each layout in order, many in one forward pass, no gradients."""
    for together in pack(layouts, pack_tokens or (1024 if model.device.type == "cpu" else 4096)):
        with torch.inference_mode():
            scored = label_logprobs(model, together)
        yield from (logprobs_L.cpu() for logprobs_L in scored)


def label_loss(
    logprobs: Sequence[Tensor], example: Example, *, control_ids: Sequence[int]
) -> tuple[Tensor, Figures]:
    """Return the cross entropy of a pack times its scale; nats of text and control tokens apart."""
    nats_L = -torch.cat(list(logprobs))
    label_L = torch.tensor(example.labels, device=nats_L.device)
    control_L = torch.isin(label_L, torch.tensor(control_ids, device=nats_L.device))
    figures = {"text_loss": nats_L[~control_L], "control_loss": nats_L[control_L], "loss": nats_L}
    return nats_L.sum() * example.scale, figures
