"""What a GGUF file says of its model: config, tokenizer with chat template, and ends of an answer.

They equal those that transformers loads from the same model's folder. Its own reader of GGUF takes
a minute, takes the token that begins a turn for its end, and does not split SmolLM2's digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from pasta_decoding.gguf_file import GgufFile

FAMILIES = ("llama", "qwen2", "qwen3")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens in a file
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
_PROBE = "PastaAnswer"


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the model's config. Raises PastaError for a family that is unknown here."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family, field = file.architecture, file.field
    if family not in FAMILIES:
        raise PastaError(
            f"{file.path} holds a model of the family {family}, not {', '.join(FAMILIES)}"
        )
    heads, scaling = field("attention.head_count"), field("rope.scaling.type", "none")
    rope = {"rope_type": "default", "rope_theta": field("rope.freq_base", 10_000.0)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": field("rope.scaling.factor")}
    elif scaling != "none":
        raise PastaError(f"{file.path} has rotary positions of the type {scaling}, unknown here")
    return AutoConfig.for_model(
        family,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        vocab_size=file.weights["model.embed_tokens.weight"].shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", field("embedding_length") // heads),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters=rope,
        tie_word_embeddings="lm_head.weight" not in file.weights,
        **{f"{role}_token_id": _special(file, name) for role, name in _ROLES.items()},
    )


def _special(file: GgufFile, name: str) -> int | None:
    found: int | None = file.fields.get(f"tokenizer.ggml.{name}_token_id")
    return found


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Raises PastaError unless it is a byte-level BPE of a known kind."""
    from transformers import PreTrainedTokenizerFast

    kind, name = (file.fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise PastaError(
            f"the tokenizer in {file.path} is of the kind {kind}, {name}; only byte-level BPE "
            f"(gpt2) of {', '.join(PRE_TOKENIZERS)} is known"
        )
    try:
        texts: list[str] = file.fields["tokenizer.ggml.tokens"]
        numbers = {role: _special(file, key) for role, key in _ROLES.items()}
        named = {f"{role}_token": texts[one] for role, one in numbers.items() if one is not None}
        backend = _backend(file, name, texts)
    except Exception as error:  # `tokenizers` raises this very class
        raise PastaError(f"the tokenizer in {file.path} cannot be read: {error!r}") from error
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    tokenizer.name_or_path = str(file.path)
    return tokenizer


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
    kinds = file.fields["tokenizer.ggml.token_type"]
    added = [(text, kinds[n] == CONTROL) for text, n in vocabulary.items()
             if kinds[n] in (CONTROL, USER_DEFINED)]  # fmt: skip
    backend.add_tokens([AddedToken(text, special=one, normalized=False) for text, one in added])
    first = _special(file, "bos")
    if first is not None and file.fields.get("tokenizer.ggml.add_bos_token", whole_words):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{texts[first]} $A", special_tokens=[(texts[first], first)]
        )
    return backend


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    plain = ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return plain
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), plain])
    words = Regex(_WORDS % (r"\p{N}" if name == "qwen2" else r"\p{N}{1,3}"))
    bare = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(words, "isolated"), bare])


def read_ends(file: GgufFile, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the ids that end an answer: those that the file names, and the chat template's.

    Files of the field name the end of a text where their model ends a turn with another token.
    """
    named = {_special(file, role) for role in ("eos", "eot", "eom")} - {None}
    return frozenset({*named, *_template_end(tokenizer)} - {None})  # type: ignore[arg-type]


def _template_end(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return []
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        rendered = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except (TemplateError, ValueError):
        return []  # encoding a prompt reports why
    behind = tokenizer.encode(rendered.partition(_PROBE)[2].lstrip(), add_special_tokens=False)
    return [token for token in behind[:1] if token in tokenizer.get_added_vocab().values()]
