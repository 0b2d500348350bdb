"""Which Hugging Face models the torch engine runs exactly; the rest are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from pasta_decoding.errors import PastaError

# These change the rotation with the length seen so far, so a cached key would depend on when it
# was computed, and decoding could not equal training.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise a `PastaError` that names the model and the first thing about it that is in the way."""
    for reason in _obstacles(model):
        raise PastaError(
            f"the torch engine cannot run this {model.config.model_type} model: {reason}",
            hint="use a decoder with rotary positions and full attention in every layer, such as "
            "Llama, SmolLM2, Qwen 2 or Qwen 3",
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
    if windowed := _windowed_layers(config):
        yield f"its attention is not full but limited by {windowed}"
    if ropes and ropes.get("rope_type") in _MOVING_ROPES:
        yield f"its rotary positions ({ropes['rope_type']}) change with the length"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its code does not take attention functions from outside"


def _windowed_layers(config: object) -> str | None:
    """Return what keeps a layer from seeing the whole context, or None."""
    if layer_types := getattr(config, "layer_types", None):
        return ", ".join(sorted(set(layer_types) - {"full_attention"})) or None
    window: int | None = getattr(config, "sliding_window", None)
    return None if window is None else f"a sliding window of {window} tokens"
