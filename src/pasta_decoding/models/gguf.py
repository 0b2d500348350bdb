"""GGUF, llama.cpp's file format: a merged checkpoint written as one file, and models read from it.

Config and tokenizer that are read equal those that transformers loads from the same model's folder.
Its own reader of GGUF takes a minute, takes the token that begins a turn for its end, and does not
split SmolLM2's digits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.gguf_file import WIDTHS, module_names, refuse_unread
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.models.pretrained import load_config

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from pasta_decoding.gguf_file import GgufFile

FAMILIES = ("llama", "qwen2", "qwen3")
FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # and their numbers as a GGUF file type
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens in a file
_DESCRIPTION = (
    "Trained for parallel decoding with Pasta (`pasta run --model FILE`). Other programs must "
    "never sample the control tokens ({ids}), or parts of answers are missing. llama.cpp's own "
    "commands obey tokenizer.ggml.suppress_tokens since its PR 26276 (July 2026); elsewhere give "
    "these ids a logit bias of minus infinity."
)
_ROPES = ("default", "llama3")
_SHAPE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Names of a model's numbers: the file's, and the config's."""
# llama.cpp names pre-tokenizers; by what their definition in a tokenizer.json contains.
PRE_TOKENIZERS = {
    "llama-bpe": r"\\p{N}{1,3}",
    "qwen2": r"|\\p{N}|",
    "smollm": '"Digits"',
    "gpt-2": '"use_regex": true',
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_gguf(loaded: LoadedModel, path: Path, *, float_type: str = "F16") -> None:
    """Write a merged checkpoint to `path`. `float_type`: F32, F16 or BF16; vectors stay F32.

    Raises PastaError for an architecture or tokenizer that has no translation here. The file is
    not written atomically: give a temporary name.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config = loaded.model.config
    checkpoint = checkpoints.describe_merged(loaded.model, loaded.checkpoint)
    _check_model(config)
    banned = sorted(checkpoint.control.ids)
    writer = GGUFWriter(path, arch=config.model_type)
    writer.add_name(checkpoint.base.name)
    writer.add_description(_DESCRIPTION.format(ids=",".join(map(str, banned))))
    writer.add_array("tokenizer.ggml.suppress_tokens", banned)
    writer.add_file_type(FLOAT_TYPES[float_type])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {key: getattr(config, name) for key, name in _SHAPE.items()}
    numbers |= dict.fromkeys(WIDTHS, width)
    numbers["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    for key, number in numbers.items():
        add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(f"{config.model_type}.{key}", number)
    _add_vocabulary(writer, loaded)
    writer.add_string(checkpoints.GGUF_KEY, checkpoints.to_json(checkpoint))
    for name, weight in _tensors(loaded.model):
        kind = GGMLQuantizationType[float_type if weight.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(weight.float().numpy(), kind), raw_dtype=kind)
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
    if (kind := config.rope_parameters["rope_type"]) not in _ROPES:
        raise _untranslated(f"rotary positions of type {kind!r}", _ROPES)
    if config.hidden_act != "silu":
        raise _untranslated(f"the activation {config.hidden_act!r}", ["silu"])
    if {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        raise _untranslated("sliding windows", ["full attention"])


def _pre_tokenizer_name(description: Mapping[str, Any]) -> str:
    text, model = json.dumps(description["pre_tokenizer"]), description["model"]
    name = next((name for name, part in PRE_TOKENIZERS.items() if part in text), None)
    if name is None or model["type"] != "BPE" or model.get("byte_fallback"):
        raise _untranslated("a tokenizer", [f"byte-level BPE of {', '.join(PRE_TOKENIZERS)}"])
    return name


def _untranslated(what: str, known: Iterable[str]) -> PastaError:
    return PastaError(f"cannot export {what} to GGUF, only {', '.join(known)}", hint="--to hf")


def _add_vocabulary(writer: GGUFWriter, loaded: LoadedModel) -> None:
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
    writer.add_tokenizer_pre(_pre_tokenizer_name(description))
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

    config = model.config
    names = module_names(config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, found in model.state_dict().items():
        weight = found
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        module, _, kind = name.rpartition(".")
        if module not in names:
            raise PastaError(f"GGUF has no place for {name} of {config.model_type} models")
        if config.model_type == "llama" and (count := heads.get(name.split(".")[-2])):
            # Hugging Face rotates (i, i + width / 2) of a head, llama.cpp (2i, 2i + 1).
            halves = weight.reshape(count, 2, -1, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        yield f"{names[module]}.{kind}", weight
    if config.rope_parameters.get("rope_type") == "llama3":  # what divides each frequency
        scaled = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(scaled)) / len(scaled)
        yield "rope_freqs.weight", config.rope_parameters["rope_theta"] ** -exponents / scaled


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the model's config. Raises PastaError for a family that is unknown here."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family, field, known = file.architecture, file.field, ", ".join(FAMILIES)
    if family not in FAMILIES:
        raise PastaError(f"{file.path} holds a model of the family {family}, not {known}")
    refuse_unread(file)
    heads = field("attention.head_count")
    shape = {name: field(key, heads if "kv" in key else None) for key, name in _SHAPE.items()}
    return AutoConfig.for_model(
        family,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        vocab_size=file.weights["model.embed_tokens.weight"].shape[0],
        head_dim=field("attention.key_length", field("embedding_length") // heads),
        **shape,
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base", 10_000.0)},
        tie_word_embeddings="lm_head.weight" not in file.weights,
        **{f"{role}_token_id": _special(file, name) for role, name in _ROLES.items()},
    )


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Raises PastaError unless it is a byte-level BPE of a known kind."""
    from transformers import PreTrainedTokenizerFast

    kind, name = (str(file.fields.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise PastaError(
            f"the tokenizer in {file.path} is of the kind {kind}, {name}; only byte-level BPE "
            f"(gpt2) of {', '.join(PRE_TOKENIZERS)} is known"
        )
    with errors_as(f"the tokenizer in {file.path} cannot be read", Exception):  # of `tokenizers`
        texts: list[str] = file.fields["tokenizer.ggml.tokens"]
        numbers = {role: _special(file, key) for role, key in _ROLES.items()}
        named = {f"{role}_token": texts[one] for role, one in numbers.items() if one is not None}
        if len({*texts}) < len(texts) or len(texts) > file.tensors["token_embd.weight"].shape[0]:
            raise ValueError("tokens are there twice, or are more than the model has")
        backend = _backend(file, name, texts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    tokenizer.name_or_path = str(file.path)
    return tokenizer


def read_ends(file: GgufFile) -> list[int | None]:
    return [_special(file, role) for role in ("eos", "eot", "eom")]


def _special(file: GgufFile, name: str) -> int | None:
    key, rows = f"tokenizer.ggml.{name}_token_id", file.tensors["token_embd.weight"].shape[0]
    found = file.fields.get(key)
    if found is not None and not (type(found) is int and 0 <= found < rows):
        raise PastaError(f"{file.path} has {found!r} as {key}, which is no token's id")
    return found


def _backend(file: GgufFile, name: str, texts: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    # Leave out texts that only pad the vocabulary to the rows of the weights: the hub's tokenizers
    # do not have them, and control tokens must be bound to the same rows in both.
    vocabulary = {text: n for n, text in enumerate(texts) if text != f"[PAD{n}]"}
    pairs = [tuple(pair.split(" ", 1)) for pair in file.fields["tokenizer.ggml.merges"]]
    merges: list[Any] = [pair for pair in pairs if "".join(pair) in vocabulary]
    whole_words = name == "llama-bpe"
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    backend.pre_tokenizer = _pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    kinds, added = file.fields["tokenizer.ggml.token_type"], []
    for text, n in vocabulary.items():
        # Some files call markers of their templates ordinary, and merges would never make them.
        is_marker = text.startswith("<|") and text.endswith("|>") and len(text) > len("<||>")
        is_control = kinds[n] == CONTROL or (is_marker and kinds[n] == NORMAL)
        if is_control or kinds[n] == USER_DEFINED:
            added.append(AddedToken(text, special=is_control, normalized=False))
    backend.add_tokens(added)
    first = _special(file, "bos")
    if first is not None and file.fields.get("tokenizer.ggml.add_bos_token", whole_words):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{texts[first]} $A", special_tokens=[(texts[first], first)]
        )
    return backend


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    words = Regex(_WORDS % (r"\p{N}" if name == "qwen2" else r"\p{N}{1,3}"))
    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(words, "isolated"), plain])
