"""GGUF, llama.cpp's file format, written: a merged checkpoint in one file, complete.

`gguf_reader` reads it back, and llama.cpp's own tools do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.gguf_reader import (
    CONTROL,
    FAMILIES,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
)
from pasta_decoding.models.load import Loaded

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

SUPPRESS_TOKENS = "tokenizer.ggml.suppress_tokens"
"""What llama.cpp's own commands never sample, since its PR 26276 of July 2026."""
ROPE_TYPES = ("default", "linear", "llama3")
FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # and their numbers as a GGUF file type


def write_gguf(
    loaded: Loaded, path: Path, *, float_type: str = "F16", progress: bool = False
) -> None:
    """Write a merged checkpoint to `path`. `float_type`: F32, F16 or BF16; vectors stay F32.

    Raises PastaError for an architecture or tokenizer that has no translation here. The file is
    not written atomically: give a temporary name.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config, checkpoint = loaded.model.config, loaded.checkpoint
    _check_model(config.model_type, getattr(config, "rope_parameters", None) or {})
    banned = sorted(checkpoint.control.ids)
    writer = GGUFWriter(path, arch=config.model_type)
    writer.add_name(checkpoint.base.name)
    writer.add_description(_description(checkpoint.base.name, banned))
    writer.add_array(SUPPRESS_TOKENS, banned)
    writer.add_file_type(FLOAT_TYPES[float_type])
    _add_shape(writer, config)
    _add_vocabulary(writer, loaded)
    writer.add_string(checkpoints.GGUF_KEY, checkpoints.to_json(checkpoint))
    for name, weight in _tensors(loaded.model):
        kind = GGMLQuantizationType[float_type if weight.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=progress)
    writer.close()


def _description(base: str, banned: Sequence[int]) -> str:
    ids = ",".join(map(str, banned))
    return (
        f"{base} trained for parallel decoding with Pasta (pasta-decoding): `pasta run --model "
        "FILE` writes the independent parts of an answer at the same time. Other programs must "
        f"never sample the control tokens ({ids}), or parts of answers are missing: llama.cpp's "
        f"own commands obey {SUPPRESS_TOKENS} since its PR 26276 (July 2026); elsewhere give each "
        "of these ids a logit bias of minus infinity. The model then writes sequentially."
    )


def has_translation(folder: Path) -> bool:
    """Could `write_gguf` take the model in this folder? Reads its settings alone.

    transformers is not imported: it takes longer than a short answer. A folder without a
    `tokenizer.json` counts as one without a translation.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _check_model(config["model_type"], {"rope_type": rope.get("type")} | rope)
        _pre_tokenizer(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except (PastaError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # loading a broken model says what is wrong
    return True


def _check_model(model_type: str, rope: Mapping[str, Any]) -> None:
    if model_type not in FAMILIES:
        raise PastaError(
            f"cannot export {model_type} models to GGUF, only {', '.join(FAMILIES)}",
            hint="--to hf",
        )
    kind = rope.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise PastaError(
            f"cannot export rotary positions of type {kind!r} to GGUF, only "
            f"{', '.join(ROPE_TYPES)}",
            hint="--to hf",
        )


def _pre_tokenizer(description: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer's way to cut text, given its tokenizer.json."""
    text = json.dumps(description["pre_tokenizer"])
    name = next((name for name, part in PRE_TOKENIZERS.items() if part in text), None)
    model = description["model"]
    if name is None or model["type"] != "BPE" or model.get("byte_fallback"):
        raise PastaError(
            "cannot export this tokenizer to GGUF: it is no byte-level BPE of "
            f"{', '.join(PRE_TOKENIZERS)}",
            hint="--to hf",
        )
    return name


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    from gguf import RopeScalingType

    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_vocabulary(writer: GGUFWriter, loaded: Loaded) -> None:
    tokenizer, size = loaded.tokenizer, loaded.model.config.vocab_size
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    model = description["model"]
    texts, kinds = [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for text, token in model["vocab"].items():
        texts[token], kinds[token] = text, NORMAL
    for added in description["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        texts[added["id"]], kinds[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(description))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    # llama.cpp wants one at least; one without a product in the vocabulary changes nothing.
    writer.add_token_merges(merges or [" ".join(texts[:2])])
    bos = tokenizer.bos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(bos is not None and tokenizer.encode("") == [bos])
    # llama.cpp has places for three tokens at which it stops.
    ends = [loaded.end, *sorted(loaded.eos_ids - {loaded.end})]
    for add, end in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id),
        ends,
        strict=False,
    ):
        add(end)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield GGUF name and weight of every tensor; tied heads are left out."""
    from pasta_decoding.gguf_file import file_name

    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        target = file_name(name, config.model_type)
        if target is None:
            raise PastaError(
                f"GGUF has no place for {name} in {config.model_type} models", hint="--to hf"
            )
        turned = heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
        yield target, weight if turned is None else _interleave(weight, turned)
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from halves, as Hugging Face rotates, to pairs, as llama.cpp.

    llama.cpp's Llama rotates neighbouring rows (2i, 2i + 1); Hugging Face rows (i, i + width / 2).
    """
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _llama3_factors(config: Any) -> Tensor:
    """Return the divisor of each rotary frequency in Llama 3.1's scaling (arXiv 2407.21783)."""
    import torch

    rope = config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    smooth = ((original / wavelengths - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
