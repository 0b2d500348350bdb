"""Log-probabilities of laid-out answers under a model, as training and decoding see them.

Shapes: T tokens of one pack, L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.data.view import View, attention_masks, pack, view
from pasta_decoding.engines.windows import attention_windows
from pasta_decoding.lang.layout import Layout


def model_inputs(pack_view: View, windows: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the keyword arguments of a Hugging Face forward whose logits are [1, L, V]."""
    return {
        "input_ids": pack_view.tokens_T[None],
        "position_ids": pack_view.position_T[None],
        "attention_mask": attention_masks(pack_view, windows),
        "logits_to_keep": pack_view.source_L,
    }


def label_logprobs(model: Any, layouts: Sequence[Layout]) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats, float32).

    Forced tokens have no label and so no entry. Gradients flow where they are enabled.
    """
    pack_view = view(layouts)
    windows = attention_windows(model.config.get_text_config())
    inputs = {
        name: _to(value, model.device) for name, value in model_inputs(pack_view, windows).items()
    }
    logprobs_L = logprobs_of(model(**inputs), pack_view.label_L.to(model.device))
    return list(torch.split(logprobs_L, [_labels(layout) for layout in layouts]))


def logprobs_of(outputs: Any, label_L: Tensor) -> Tensor:
    """Return the log-probability of every label (nats), in float32 at least."""
    logits_LV = outputs.logits[0]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    return -cross_entropy(logits_LV, label_L, reduction="none")


def score_layouts(
    model: Any, layouts: Sequence[Layout], *, pack_tokens: int = 1024
) -> Iterator[Tensor]:
    """Yield `label_logprobs` of each layout in order, many in one forward pass, no gradients."""
    for together in pack(layouts, pack_tokens):
        with torch.inference_mode():
            scored = label_logprobs(model, together)
        yield from (logprobs_L.cpu() for logprobs_L in scored)


def _labels(layout: Layout) -> int:
    return sum(label is not None for label in layout.label)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(one, device) for name, one in value.items()}
    return value.to(device)
