"""A tiny checkpoint on disk: a random Llama in Hugging Face form, and an adapter for it.

Its tokenizer writes one token a byte, has a chat template, and spare tokens that become the
control tokens, so that everything a command does with the default model works on it too.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.lang.control import BUCKETS
from pasta_decoding.models.bases import DEFAULT_MODEL
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter
from pasta_decoding.models.load import load_base
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.lora import add_lora, save
from tests.tiny import OPERATORS, seeded, tiny_llama

BASE_NAME = "tests/tiny-llama"
END = "<|im_end|>"
END_ID = 257
TAG_BIAS = 2.0
SPARE = [f"<unused{n}>" for n in range(len(BUCKETS) + 4)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """Folders of a base model and of an adapter for it. Shared: copy before you change them."""

    base: Path
    adapter: Path

    @property
    def source(self) -> BaseWithAdapter:
        return BaseWithAdapter(self.base, self.adapter)


def make_checkpoint(folder: Path) -> TinyCheckpoint:
    """Write base and adapter into `folder`."""
    base = make_base(folder / "base")
    return TinyCheckpoint(base, make_adapter(base, folder / "adapter"))


def keep_base(base: Path, cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Put a folder into the cache as the known model of this name."""
    OPERATORS.mkdir(parents=True, exist_ok=True)
    if not (cache / "operators").exists():
        cache.mkdir(exist_ok=True)
        (cache / "operators").symlink_to(OPERATORS)
    return Path(shutil.copytree(base, cache / name))


def torch_decoder(base: Path, adapter: Path | None, **settings: Any) -> LocalDecoder:
    """Load a checkpoint, whole if both are one folder, onto the torch engine in float32."""
    name = "none" if adapter is None else None if adapter == base else str(adapter)
    config = EngineConfig(name, base, "torch", dtype="float32", device="cpu", **settings)
    return open_local(config, base)


def byte_tokenizer(
    special: Sequence[str] = SPARE, added: Sequence[str] = (), template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """One token a byte, chat markers, and by default as many spare tokens as control tokens.

    added: tokens that are not flagged special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = ["<|im_start|>", END, *special]
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


def make_base(folder: Path, *, seed: int = 0) -> Path:
    """Save a tiny random Llama and its tokenizer; another seed gives another model."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(
        vocabulary=len(tokenizer),
        seed=seed,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.no_grad(), seeded(seed):
        _make_lifelike(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, *, name: str = BASE_NAME, seed: int = 0) -> Path:
    """Save an adapter with random weights for the model in `base`, and its `pasta.json`."""
    loaded = load_base(BaseAlone(base))
    record = loaded.checkpoint
    with seeded(seed):
        lora = add_lora(loaded.model, record.control, SftConfig(lora_rank=2))
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
    record = replace(record, base=replace(record.base, name=name), joins=("kv",))
    return save(replace(loaded, model=lora, checkpoint=record), folder)


def _make_lifelike(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Let it write readable characters, and tags now and then; let no two models' norms agree."""
    rows_VD: torch.Tensor = model.model.embed_tokens.weight
    for text, token in tokenizer.get_vocab().items():
        if text in SPARE:
            rows_VD[token] *= TAG_BIAS
        elif not (text.isascii() or text in ("Ġ", "Ċ")):
            rows_VD[token] = 0
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.add_(0.1 * torch.randn_like(weight))
