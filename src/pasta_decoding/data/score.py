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


def model_inputs(
    pack_view: View, windows: Mapping[str, int | None], *, blocks: bool = False
) -> dict[str, Any]:
    """Return the keyword arguments of a Hugging Face forward whose logits are [1, L, V].

    They lie where `pack_view` does. `blocks`: see `attention_masks`.
    """
    return {
        "input_ids": pack_view.tokens_T[None],
        "position_ids": pack_view.position_T[None],
        "attention_mask": attention_masks(pack_view, windows, blocks=blocks),
        "logits_to_keep": pack_view.source_L,
        "use_cache": False,
    }


def takes_blocks(model: Any) -> bool:
    """Does this model compute flex attention, which takes block masks?"""
    return model.config.get_text_config()._attn_implementation == "flex_attention"


def label_logprobs(model: Any, layouts: Sequence[Layout]) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats, float32).

    Forced tokens have no label and so no entry. Gradients flow where they are enabled.
    """
    pack_view = view(layouts).to(model.device)
    windows = attention_windows(model.config.get_text_config())
    outputs = model(**model_inputs(pack_view, windows, blocks=takes_blocks(model)))
    logprobs_L = logprobs_of(outputs, pack_view.label_L)
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
