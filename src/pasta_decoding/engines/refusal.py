"""Which Hugging Face models the torch engine runs exactly; the rest are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from pasta_decoding.engines.windows import FULL, SLIDING, attention_windows
from pasta_decoding.errors import PastaError

# These change the rotation with the length seen so far, so a cached key would depend on when it
# was computed, and decoding could not equal training.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise a `PastaError` that names the model and the first thing about it that is in the way."""
    for reason in _obstacles(model):
        raise PastaError(
            f"the torch engine cannot run this {model.config.model_type} model: {reason}",
            hint="use a decoder with rotary positions and full or sliding-window attention, such "
            "as Llama, SmolLM2, Qwen 2, Qwen 3 or Gemma 3",
        )


def _obstacles(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None)
    if model.config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False):
        yield "it has recurrent layers, whose state cannot be forked and joined"
    if not ropes or getattr(config, "alibi", False):
        yield "it has no rotary positions (RoPE)"
    yield from _unusual_attention(config)
    for moving in sorted(_rope_types(ropes or {}) & _MOVING_ROPES):
        yield f"its rotary positions ({moving}) change with the length"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its code does not take attention functions from outside"


def _unusual_attention(config: Any) -> Iterator[str]:
    if others := ", ".join(sorted(set(attention_windows(config)) - {FULL, SLIDING})):
        yield f"its attention is neither full nor a sliding window but {others}"
    if getattr(config, "attn_logit_softcapping", None):
        yield "its attention caps its scores"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its attention is bidirectional"


def _rope_types(ropes: dict[str, Any]) -> set[str]:
    """Return the types of rotary positions: one for all layers, or one for each kind of layer."""
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return {str(rope.get("rope_type")) for rope in nested or [ropes]}
