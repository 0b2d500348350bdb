"""Config and tokenizer of a model in a GGUF file, as transformers loads them from its folder.

transformers' own reader of GGUF takes a minute, takes the token that begins a turn for its end, and
does not split SmolLM2's digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.gguf_file import GgufFile, refuse_unread

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3")
# The kinds of a token, by the format's numbers
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
CONFIG_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""The file's names of a model's numbers, and the config's."""
PRE_TOKENIZERS = {
    "llama-bpe": r"\\p{N}{1,3}",
    "qwen2": r"|\\p{N}|",
    "smollm": '"Digits"',
    "gpt-2": '"use_regex": true',
}
"""llama.cpp's names of pre-tokenizers, and what tells their definition in a tokenizer.json."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen 2 and Llama 3 split words; `%s` is how they split numbers."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens, and the file's."""


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the model's config. Raises PastaError for a family that is unknown here."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = file.architecture
    if family not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise PastaError(f"{file.path} holds a model of the family {family}, not {families}")
    refuse_unread(file)
    heads = file.field("attention.head_count")
    defaults = {"attention.head_count_kv": heads}
    shape = {name: file.field(key, defaults.get(key)) for key, name in CONFIG_FIELDS.items()}
    rope_theta = file.field("rope.freq_base", 10_000.0)
    special_ids = {f"{role}_token_id": _special_id(file, name) for role, name in _ROLES.items()}
    return AutoConfig.for_model(
        family,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        vocab_size=file.weights["model.embed_tokens.weight"].shape[0],
        head_dim=file.field("attention.key_length", file.field("embedding_length") // heads),
        **shape,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings="lm_head.weight" not in file.weights,
        **special_ids,
    )


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Raises PastaError unless it is a byte-level BPE of a known kind."""
    from transformers import PreTrainedTokenizerFast

    kind = str(file.fields.get("tokenizer.ggml.model"))
    name = str(file.fields.get("tokenizer.ggml.pre"))
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise PastaError(
            f"the tokenizer in {file.path} is of the kind {kind}, {name}; only byte-level BPE "
            f"(gpt2) of {', '.join(PRE_TOKENIZERS)} is known"
        )
    # The package `tokenizers` raises plain exceptions.
    with errors_as(f"the tokenizer in {file.path} cannot be read", Exception):
        texts: list[str] = file.fields["tokenizer.ggml.tokens"]
        rows = file.tensors["token_embd.weight"].shape[0]
        if len({*texts}) < len(texts) or len(texts) > rows:
            raise ValueError("tokens are there twice, or are more than the model has")
        special_texts = {}
        for role, key in _ROLES.items():
            token = _special_id(file, key)
            if token is not None:
                special_texts[f"{role}_token"] = texts[token]
        backend = _backend(file, name, texts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_texts)
    tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    tokenizer.name_or_path = str(file.path)
    return tokenizer


def read_ends(file: GgufFile) -> list[int | None]:
    """Return the ids at which generation stops; None where the file names none."""
    return [_special_id(file, role) for role in ("eos", "eot", "eom")]


def _special_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    rows = file.tensors["token_embd.weight"].shape[0]
    token = file.fields.get(key)
    if token is not None and not (type(token) is int and 0 <= token < rows):
        raise PastaError(f"{file.path} has {token!r} as {key}, which is no token's id")
    return token


def _backend(file: GgufFile, name: str, texts: list[str]) -> Tokenizer:
    """Return the tokenizer that transformers wraps. `name` is that of its pre-tokenizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    # Leave out texts that only pad the vocabulary to the rows of the weights: the hub's tokenizers
    # do not have them, and control tokens must be bound to the same rows in both.
    vocabulary = {text: token for token, text in enumerate(texts) if text != f"[PAD{token}]"}
    pairs = [tuple(pair.split(" ", 1)) for pair in file.fields["tokenizer.ggml.merges"]]
    merges: list[Any] = [pair for pair in pairs if "".join(pair) in vocabulary]
    is_llama3 = name == "llama-bpe"
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = _pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_tokens(_added_tokens(vocabulary, file.fields["tokenizer.ggml.token_type"]))
    bos = _special_id(file, "bos")
    if bos is not None and file.fields.get("tokenizer.ggml.add_bos_token", is_llama3):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{texts[bos]} $A", special_tokens=[(texts[bos], bos)]
        )
    return backend


def _added_tokens(vocabulary: dict[str, int], kinds: list[int]) -> list[Any]:
    """Return the tokens that no merge makes: control tokens, and what a user defined."""
    from tokenizers import AddedToken

    added = []
    for text, token in vocabulary.items():
        # Some files call markers of their templates ordinary, and merges would never make them.
        is_marker = text.startswith("<|") and text.endswith("|>") and len(text) > len("<||>")
        is_control = kinds[token] == CONTROL or (is_marker and kinds[token] == NORMAL)
        if is_control or kinds[token] == USER_DEFINED:
            added.append(AddedToken(text, special=is_control, normalized=False))
    return added


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    numbers = r"\p{N}" if name == "qwen2" else r"\p{N}{1,3}"
    words = Split(Regex(_WORDS % numbers), "isolated")
    return Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
