"""Tiny random checkpoints of the shape of models on the hub: tokenizer, chat template, geometry.

Vocabularies hold one token a byte or character and a few words; special tokens, their flags and
their order, normaliser, pre-tokenizer and template are those of the originals.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedTokenizerFast

from tests.tiny import SHAPE, seeded, tiny_llama

TEMPLATES = Path(__file__).parent / "templates"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 20)),
]


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes; a word of the vocabulary is taken whole; reserved tokens; an end of each turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["user", "assistant", "system", "ĊĊ"]
    vocabulary = {text: index for index, text in enumerate([*alphabet, *words])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in LLAMA3_SPECIAL])
    bos = LLAMA3_SPECIAL[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="<|eot_id|>"
    )
    tokenizer.chat_template = (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8")
    return tokenizer


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, spaces as U+2581, other bytes by name; unused tokens that are not special."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    unused = [f"<unused{n}>" for n in range(20)]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    lines = ["\n" * n for n in range(1, 4)]
    spaces = ["\u2581" * n for n in range(2, 4)]
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    characters = ["\u2581", *(chr(n) for n in range(33, 127))]
    texts = [*special, *unused, *turns, *lines, *spaces, *bytes_, *characters]
    backend = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=[("\n", "\n"), ("\u2581", "\u2581")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in [*special, *turns]])
    plain = [*unused, *lines, *spaces]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = (TEMPLATES / "gemma.jinja").read_text(encoding="utf-8")
    return tokenizer


def make_llama3(folder: Path) -> Path:
    """Save a tiny Llama 3: grouped queries, a wide rotary base, a head that is not tied."""
    tokenizer = llama3_tokenizer()
    model = tiny_llama(
        vocabulary=len(tokenizer),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    _same_rows(model, [text for text in LLAMA3_SPECIAL if "reserved" in text], tokenizer)
    return _save(model, tokenizer, folder)


def make_gemma(folder: Path) -> Path:
    """Save a tiny Gemma: heads wider than the model, one key for all of them, a tied head."""
    tokenizer = gemma_tokenizer()
    geometry = {"head_dim": 16, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True}
    with seeded(0):
        config = GemmaConfig(vocab_size=len(tokenizer), **SHAPE | geometry | ends)
        model = GemmaForCausalLM(config).eval()
    return _save(model, tokenizer, folder)


def _same_rows(model: Any, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Give these tokens one row, in and out: nobody ever trained them."""
    ids = [tokenizer.convert_tokens_to_ids(text) for text in texts]
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        with torch.no_grad():
            layer.weight[ids] = layer.weight[ids[0]].clone()


def _save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


HUB_SHAPES: dict[str, Callable[[Path], Path]] = {"llama3": make_llama3, "gemma": make_gemma}
