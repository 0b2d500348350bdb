"""A merged checkpoint written as one GGUF file, llama.cpp's file format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import WIDTHS, module_names
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.gguf_reader import (
    CONFIG_FIELDS,
    CONTROL,
    FAMILIES,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
)
from pasta_decoding.models.pretrained import load_config

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

    from pasta_decoding.models.load import LoadedModel

FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
"""Number formats that need no quantiser, and their numbers as a GGUF file type."""
_DESCRIPTION = (
    "Trained for parallel decoding with Pasta (`pasta run --model FILE`). Other programs must "
    "never sample the control tokens ({ids}), or parts of answers are missing. llama.cpp's own "
    "commands obey tokenizer.ggml.suppress_tokens since its PR 26276 (July 2026); elsewhere give "
    "these ids a logit bias of minus infinity."
)
_ROPES = ("default", "llama3")


def write_gguf(loaded: LoadedModel, path: Path, *, float_type: str = "F16") -> None:
    """Write a merged checkpoint to `path`. `float_type`: F32, F16 or BF16; vectors stay F32.

    Raises PastaError for an architecture or tokenizer that has no translation here. The file is
    not written atomically: give a temporary name.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config = loaded.model.config
    checkpoint = checkpoints.describe_merged(loaded.model, loaded.checkpoint)
    _check_model(config)
    control_ids = sorted(checkpoint.control.ids)
    writer = GGUFWriter(path, arch=config.model_type)
    writer.add_name(checkpoint.base.name)
    writer.add_description(_DESCRIPTION.format(ids=",".join(map(str, control_ids))))
    writer.add_array("tokenizer.ggml.suppress_tokens", control_ids)
    writer.add_file_type(FLOAT_TYPES[float_type])
    _add_config(writer, config)
    _add_vocabulary(writer, loaded)
    writer.add_string(checkpoints.GGUF_KEY, checkpoints.to_json(checkpoint))
    for name, weight in _tensors(loaded.model):
        number_type = GGMLQuantizationType[float_type if weight.ndim > 1 else "F32"]
        numbers = quantize(weight.float().numpy(), number_type)
        writer.add_tensor(name, numbers, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def has_translation(folder: Path) -> bool:
    """Could `write_gguf` take the model in this folder? Reads its settings and `tokenizer.json`."""
    try:
        _check_model(load_config(folder))
        _pre_tokenizer_name(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except (PastaError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # loading a broken model says what is wrong
    return True


def _check_model(config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise _untranslated(f"{config.model_type} models", FAMILIES)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _ROPES:
        raise _untranslated(f"rotary positions of type {rope_type!r}", _ROPES)
    if config.hidden_act != "silu":
        raise _untranslated(f"the activation {config.hidden_act!r}", ["silu"])
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention"}:
        raise _untranslated("sliding windows", ["full attention"])


def _pre_tokenizer_name(description: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a tokenizer.json."""
    definition = json.dumps(description["pre_tokenizer"])
    model = description["model"]
    name = next((name for name, part in PRE_TOKENIZERS.items() if part in definition), None)
    if name is None or model["type"] != "BPE" or model.get("byte_fallback"):
        raise _untranslated("a tokenizer", [f"byte-level BPE of {', '.join(PRE_TOKENIZERS)}"])
    return name


def _untranslated(feature: str, alternatives: Iterable[str]) -> PastaError:
    message = f"cannot export {feature} to GGUF, only {', '.join(alternatives)}"
    return PastaError(message, hint="--to hf")


def _add_config(writer: GGUFWriter, config: Any) -> None:
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    numbers = {key: getattr(config, name) for key, name in CONFIG_FIELDS.items()}
    numbers |= dict.fromkeys(WIDTHS, head_size)
    numbers["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    for key, number in numbers.items():
        add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(f"{config.model_type}.{key}", number)


def _add_vocabulary(writer: GGUFWriter, loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    rows = loaded.model.config.vocab_size
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    model = description["model"]
    texts = [f"[PAD{token}]" for token in range(rows)]
    kinds = [UNUSED] * rows
    for text, token in model["vocab"].items():
        texts[token] = text
        kinds[token] = NORMAL
    for added in description["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer_name(description))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    # llama.cpp needs at least one; a merge whose product is no token changes nothing.
    writer.add_token_merges(merges or [" ".join(texts[:2])])
    bos = tokenizer.bos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(bos is not None and tokenizer.encode("") == [bos])
    # llama.cpp's format has fields for three tokens at which it stops.
    add_end = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    ends = [loaded.end, *sorted(loaded.eos_ids - {loaded.end})]
    for add, end in zip(add_end, ends, strict=False):
        add(end)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield GGUF name and weight of every tensor; tied heads are left out."""
    import torch

    config = model.config
    names = module_names(config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        module, _, kind = name.rpartition(".")
        if module not in names:
            raise PastaError(f"GGUF has no place for {name} of {config.model_type} models")
        yield f"{names[module]}.{kind}", _paired(weight, module.rpartition(".")[2], config)
    if config.rope_parameters.get("rope_type") == "llama3":  # what divides each frequency
        scaled = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(scaled)) / len(scaled)
        yield "rope_freqs.weight", config.rope_parameters["rope_theta"] ** -exponents / scaled


def _paired(weight: Tensor, layer: str, config: Any) -> Tensor:
    """Return a weight with the rows of a query's or key's head in llama.cpp's order.

    Of a Llama, Hugging Face rotates rows i and i + head size / 2 together, llama.cpp 2i and 2i + 1.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama" or layer not in heads:
        return weight
    halves = weight.reshape(heads[layer], 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
