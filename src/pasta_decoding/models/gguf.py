"""GGUF, llama.cpp's file format: a merged checkpoint written to one file, and read back.

The file is complete: weights, vocabulary, `pasta.json`, and the tokenizer as Hugging Face saves
it, so that text becomes the same ids as everywhere else.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import Loaded
from pasta_decoding.models.tokenizer import FileTokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

CHECKPOINT, ENDS, TOKENIZER = "pasta.checkpoint", "pasta.ends", "pasta.tokenizer"
SUPPRESS_TOKENS = "tokenizer.ggml.suppress_tokens"
"""What llama.cpp's own commands never sample, since its PR 26276 of July 2026."""
ROPE_TYPES = ("default", "linear", "llama3")
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # and their numbers as a GGUF file type

# llama.cpp names pre-tokenizers; these are told apart by what their definition contains.
_PRE_TOKENIZERS = (
    (r"\\p{N}{1,3}", "llama-bpe"),
    (r"|\\p{N}|", "qwen2"),
    ('"Digits"', "smollm"),
)
_TOKENIZER_FILES = re.compile(r"(tokenizer|special_tokens|chat_template|added_tokens)[^/]*")


def write_gguf(
    loaded: Loaded, path: Path, *, float_type: str = "F16", progress: bool = False
) -> None:
    """Write a merged checkpoint to `path`. `float_type`: F32, F16 or BF16; vectors stay F32.

    Raises PastaError for an architecture or tokenizer that has no translation here. The file is
    not written atomically: give a temporary name.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config = loaded.model.config
    check_translation(config, loaded.tokenizer)
    name = ARCHITECTURES[config.model_type]
    ends = [loaded.end, *sorted(loaded.eos_ids - {loaded.end})]
    writer = GGUFWriter(path, arch=config.model_type)
    writer.add_name(loaded.checkpoint.base.name)
    banned = sorted(loaded.checkpoint.control.ids)
    writer.add_description(_description(loaded.checkpoint.base.name, banned))
    writer.add_array(SUPPRESS_TOKENS, banned)
    writer.add_file_type(FLOAT_TYPES[float_type])
    _add_shape(writer, config)
    _add_vocabulary(writer, loaded)
    for add, end in zip(_end_writers(writer), ends, strict=False):
        add(end)
    _add_own_metadata(writer, loaded)
    for tensor_name, weight in _tensors(loaded.model, name):
        kind = GGMLQuantizationType[float_type if weight.ndim > 1 else "F32"]
        writer.add_tensor(tensor_name, quantize(weight, kind), raw_dtype=kind)
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


def check_translation(config: Any, tokenizer: Any) -> None:
    """Raise PastaError for an architecture, rotary positions or tokenizer unknown here."""
    _check_model(config.model_type, getattr(config, "rope_parameters", None) or {})
    _check_tokenizer(tokenizer.backend_tokenizer.to_str())


def has_translation(folder: Path) -> bool:
    """Could `write_gguf` take the model in this folder? Told from its settings alone.

    transformers is not imported: it takes longer than a short answer. A folder without a
    `tokenizer.json` counts as one without a translation.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _check_model(config["model_type"], {"rope_type": rope.get("type")} | rope)
        _check_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (PastaError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # a broken model is told by whoever loads it
    return True


def _check_model(model_type: str, rope: Mapping[str, Any]) -> None:
    if model_type not in ARCHITECTURES:
        raise PastaError(
            f"cannot export {model_type} models to GGUF, only {', '.join(ARCHITECTURES)}",
            hint="--to hf",
        )
    kind = rope.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise PastaError(
            f"cannot export rotary positions of type {kind!r} to GGUF, only "
            f"{', '.join(ROPE_TYPES)}",
            hint="--to hf",
        )


def _check_tokenizer(description: str) -> None:
    model = json.loads(description)["model"]
    bytes_alone = model["type"] == "BPE" and not model.get("byte_fallback")
    if not bytes_alone:
        raise PastaError(
            "cannot export this tokenizer to GGUF: it is no byte-level BPE", hint="--to hf"
        )


def _add_shape(writer: GGUFWriter, config: Any) -> None:
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
    _add_rope(writer, config.rope_parameters)


def _add_rope(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_vocabulary(writer: GGUFWriter, loaded: Loaded) -> None:
    from gguf import TokenType

    tokenizer, size = loaded.tokenizer, loaded.model.config.vocab_size
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    model = description["model"]
    texts = [f"[PAD{n}]" for n in range(size)]
    types = [TokenType.UNUSED] * size
    for text, token in model["vocab"].items():
        texts[token], types[token] = text, TokenType.NORMAL
    for added in description["added_tokens"]:
        special = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        texts[added["id"]], types[added["id"]] = added["content"], special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(description))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    # llama.cpp wants one at least; one without a product in the vocabulary changes nothing.
    writer.add_token_merges(merges or [" ".join(texts[:2])])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _end_writers(writer: GGUFWriter) -> tuple[Callable[[int], None], ...]:
    """Return what names tokens at which llama.cpp stops; it has places for three."""
    return writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id


def _pre_tokenizer(description: dict[str, Any]) -> str:
    text = json.dumps(description["pre_tokenizer"])
    return next((name for part, name in _PRE_TOKENIZERS if part in text), "gpt-2")


def _add_own_metadata(writer: GGUFWriter, loaded: Loaded) -> None:
    with tempfile.TemporaryDirectory() as folder:
        loaded.tokenizer.save_pretrained(folder)
        files = {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(Path(folder).iterdir())
            if _TOKENIZER_FILES.fullmatch(path.name)
        }
    writer.add_string(CHECKPOINT, checkpoints.to_json(loaded.checkpoint))
    writer.add_string(ENDS, json.dumps(sorted(loaded.eos_ids)))
    writer.add_string(TOKENIZER, json.dumps(files))


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield GGUF name and weight of every tensor; tied heads are left out."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if architecture == "LLAMA":
            if ".q_proj." in name:
                weight = _interleave(weight, config.num_attention_heads)
            elif ".k_proj." in name:
                weight = _interleave(weight, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise PastaError(
                f"GGUF has no place for {name} in {config.model_type} models", hint="--to hf"
            )
        yield target, weight
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def _interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of each head from halves, as Hugging Face rotates, to pairs, as llama.cpp.

    llama.cpp's Llama rotates neighbouring rows (2i, 2i + 1); Hugging Face rows (i, i + width / 2).
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _llama3_factors(config: Any) -> np.ndarray[Any, Any]:
    """By how much Llama 3.1's scaling divides each rotation frequency (arXiv 2407.21783)."""
    rope = config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.astype(np.float32)


def read_metadata(value: Callable[[str], str | None], source: Path) -> Loaded:
    """Return checkpoint and tokenizer of a GGUF that `write_gguf` wrote, without its weights.

    `value` tells the metadata of a key. Raises PastaError where Pasta's is missing.
    """
    texts = {key: value(key) for key in (CHECKPOINT, ENDS, TOKENIZER)}
    for key, text in texts.items():
        if text is None:
            raise PastaError(
                f"{source} holds no {key}: it was not made by `pasta export`",
                hint="pasta export ADAPTER --to gguf -o FILE",
            )
    checkpoint = checkpoints.from_json(str(texts[CHECKPOINT]), str(source))
    tokenizer = FileTokenizer(json.loads(str(texts[TOKENIZER])), str(source))
    return Loaded(None, tokenizer, checkpoint, frozenset(json.loads(str(texts[ENDS]))))
