"""GGUF, llama.cpp's file format, written: a merged checkpoint in one file, complete.

`gguf_reader` reads it back, and llama.cpp's own tools do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
_DESCRIPTION = (
    "Trained for parallel decoding with Pasta (pasta-decoding): `pasta run --model FILE` writes "
    "the independent parts of an answer at the same time. Other programs must never sample the "
    "control tokens ({ids}), or parts of answers are missing: llama.cpp's own commands obey "
    "tokenizer.ggml.suppress_tokens since its PR 26276 (July 2026); elsewhere give each of these "
    "ids a logit bias of minus infinity. The model then writes sequentially."
)
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
    writer.add_description(_DESCRIPTION.format(ids=",".join(map(str, banned))))
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
        raise _untranslated(f"{model_type} models", f"only {', '.join(FAMILIES)}")
    if (kind := rope.get("rope_type") or "default") not in ROPE_TYPES:
        raise _untranslated(f"rotary positions of type {kind!r}", f"only {', '.join(ROPE_TYPES)}")


def _pre_tokenizer(description: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer's way to cut text, given its tokenizer.json."""
    text, model = json.dumps(description["pre_tokenizer"]), description["model"]
    name = next((name for name, part in PRE_TOKENIZERS.items() if part in text), None)
    if name is None or model["type"] != "BPE" or model.get("byte_fallback"):
        raise _untranslated("a tokenizer", f"only byte-level BPE of {', '.join(PRE_TOKENIZERS)}")
    return name


def _untranslated(what: str, known: str) -> PastaError:
    return PastaError(f"cannot export {what} to GGUF, {known}", hint="--to hf")


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
    places = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    ends = [loaded.end, *sorted(loaded.eos_ids - {loaded.end})]
    for add, end in zip(places, ends, strict=False):
        add(end)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield GGUF name and weight of every tensor; tied heads are left out."""
    import torch

    from pasta_decoding.gguf_file import file_name

    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        target = file_name(name, config.model_type)
        if target is None:
            raise _untranslated(f"{config.model_type} models", f"which has no place for {name}")
        turned = heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
        yield target, weight if turned is None else _interleave(weight, turned)
    if config.rope_parameters.get("rope_type") == "llama3":  # what divides each frequency
        scaled = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(scaled)) / len(scaled)
        yield "rope_freqs.weight", config.rope_parameters["rope_theta"] ** -exponents / scaled


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows: Hugging Face rotates (i, i + width / 2) of a head, llama.cpp (2i, 2i + 1)."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
