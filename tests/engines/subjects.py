"""The engines that must keep the contract, each with an oracle that knows what is right."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.fast import FastEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.engines.weights import ModelWeights
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import choose_tokens
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import LoadedModel
from tests.engines.oracle import Oracle, Recorder, by_script, dense
from tests.scripted import ScriptedEngine, shuffled
from tests.tiny import OPERATORS, TINY_MODELS, VOCABULARY


@dataclass(frozen=True)
class Subject:
    """An engine under test and an oracle that must agree with it."""

    engine: Engine
    oracle: Oracle

    def record(self) -> Recorder:
        return Recorder(self.engine)


def scripted_subject() -> Subject:
    script = shuffled(VOCABULARY)
    engine = ScriptedEngine(script, VOCABULARY, max_positions=512, max_slots=4000, max_branches=50)
    return Subject(engine, by_script(script))


@cache
def plain(name: str) -> PreTrainedModel:
    return TINY_MODELS[name]()


def torch_subject(name: str, device: str = "cpu", *, paged: bool = False) -> Subject:
    # The oracle's model is another one: it must not have the engine's attention function.
    model = nn.Module.to(TINY_MODELS[name](), device)
    return Subject(padded(model) if paged else TorchEngine(model), dense(plain(name)))


def padded(model: PreTrainedModel, cache_tokens: int = 4000) -> TorchEngine:
    """Return an engine whose passes have few sizes, as on a GPU."""
    engine = TorchEngine(model, cache_tokens=cache_tokens)
    engine._padded = True
    return engine


def fast(weights: ModelWeights, *, plain: bool = False, **settings: Any) -> FastEngine:
    return FastEngine(weights, operators=None if plain else OPERATORS, **settings)


def fast_subject(name: str, *, plain_torch: bool = False) -> Subject:
    return Subject(fast(ModelWeights(plain(name)), plain=plain_torch), dense(plain(name)))


def llama_subject(name: str) -> Subject:
    from pasta_decoding.engines.llama import LlamaEngine

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_gguf(speaking(plain(name)), path, float_type="F32")
        engine = LlamaEngine(path, cache_tokens=4096, threads=1, cache_type="F32")
    return Subject(engine, dense(plain(name)))


def speaking(model: PreTrainedModel) -> LoadedModel:
    """Return a tiny model with a tokenizer and control tokens, as if it were a checkpoint."""
    words = [chr(ord("!") + n) for n in range(60)]
    backend = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([f"<unused{n}>" for n in range(14)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    control = choose_tokens(tokenizer)
    checkpoint = checkpoints.describe(model, tokenizer, control, name="tests/tiny")
    return LoadedModel(model, tokenizer, checkpoint, frozenset({0}))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "scripted": scripted_subject,
    "torch-llama": lambda: torch_subject("llama"),
    "torch-qwen2": lambda: torch_subject("qwen2"),
    "torch-qwen3": lambda: torch_subject("qwen3"),
    "torch-gemma3": lambda: torch_subject("gemma3"),
    "torch-llama-paged": lambda: torch_subject("llama", paged=True),
    "torch-gemma3-paged": lambda: torch_subject("gemma3", paged=True),
    "fast-llama": lambda: fast_subject("llama"),
    "fast-qwen2": lambda: fast_subject("qwen2"),
    "fast-qwen3": lambda: fast_subject("qwen3"),
    "fast-gemma3": lambda: fast_subject("gemma3"),
    "fast-gemma3-torch": lambda: fast_subject("gemma3", plain_torch=True),
    "llama-llama": lambda: llama_subject("llama"),
    "llama-qwen2": lambda: llama_subject("qwen2"),
    "llama-qwen3": lambda: llama_subject("qwen3"),
    "torch-cuda": lambda: torch_subject("llama", "cuda"),
}

MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "torch-cuda": [pytest.mark.gpu],
    **{name: [pytest.mark.llama] for name in SUBJECTS if name.startswith("llama-")},
}
