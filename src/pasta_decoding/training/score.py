"""Log-probabilities of laid-out answers under a model, as training and decoding see them.

Shapes: T tokens of one pack, L labelled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.view import View, attention_masks, pack, view


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
    return _read(model, layouts)[0]


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


def read_layouts(
    model: Any, layouts: Sequence[Layout], *, layers: Sequence[int] = (), pack_tokens: int = 1024
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield as `score_layouts`, and with it the hidden states of the layout's tokens.

    These are states_TD (float32): what comes out of `layers`, in a row; 0 is the embeddings. None
    if there are no layers.
    """
    for together in pack(layouts, pack_tokens):
        with torch.inference_mode():
            logprobs, hidden = _read(model, together, states=bool(layers))
        sizes = [len(layout.tokens) for layout in together]
        if layers:
            states_TD = torch.cat([hidden[layer][0] for layer in layers], dim=1).float().cpu()
            states = torch.split(states_TD, sizes)
        for index, logprobs_L in enumerate(logprobs):
            yield logprobs_L.cpu(), states[index] if layers else None


def _read(
    model: Any, layouts: Sequence[Layout], *, states: bool = False
) -> tuple[list[Tensor], Any]:
    pack_view = view(layouts).to(model.device)
    windows = attention_windows(model.config.get_text_config())
    inputs = model_inputs(pack_view, windows, blocks=takes_blocks(model))
    outputs = model(**inputs, output_hidden_states=states)
    logprobs_L = logprobs_of(outputs, pack_view.label_L)
    split = torch.split(logprobs_L, [_labels(layout) for layout in layouts])
    return list(split), outputs.hidden_states


def _labels(layout: Layout) -> int:
    return sum(label is not None for label in layout.label)
