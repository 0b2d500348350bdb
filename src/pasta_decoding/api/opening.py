"""From a config to a decoder: which engine is taken, and how each one is opened.

A new engine is a file in `engines/` and an entry of `ENGINES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.api.config import EngineConfig, beside_whole, check_name
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.remote.decoder import RemoteDecoder
    from pasta_decoding.runtime.local import LocalDecoder

log = logging.getLogger(__name__)
TORCH_DTYPES = ("auto", "float32", "bfloat16")
"""Number formats that the engines torch and fast compute in."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that a config names, to be opened.

    base:    folder of the weights, or a GGUF file.
    adapter: folder of the adapter; `base` itself for a whole model, None for a base model alone.
    cache:   folder for what is exported on the way.
    """

    config: EngineConfig
    base: Path
    adapter: Path | None
    cache: Path

    @property
    def is_gguf(self) -> bool:
        """Is it one GGUF file?"""
        return self.base.suffix == ".gguf"

    @property
    def device(self) -> str:
        """Where torch would compute."""
        from pasta_decoding.models.load import default_device

        return self.config.device or default_device()

    @property
    def sizes(self) -> dict[str, Any]:
        """Options of every engine in this process."""
        config = self.config
        return {
            "cache_tokens": config.cache_tokens,
            "threads": config.threads,
            "joining": config.join,
        }


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How an engine is chosen and opened.

    suits: may `auto` take it? Looks at checkpoint and machine, and loads nothing large.
    dtype: the number format that it computes in; None if it is not known here.
    open:  load the checkpoint onto it. Raises PastaError.
    """

    suits: Callable[[Checkpoint], bool]
    dtype: Callable[[Checkpoint], str | None]
    open: Callable[[Checkpoint], LocalDecoder | RemoteDecoder]


def open_decoder(config: EngineConfig, cache: Path) -> LocalDecoder | RemoteDecoder:
    """Load a checkpoint onto an engine, or find the servers that have it. Raises PastaError."""
    from pasta_decoding.engines.support import release_openmp_threads

    checkpoint = find(config, cache)
    name = choose_engine(checkpoint)
    if config.base_url and name != "remote":
        raise PastaError(f"base_url names servers, and the engine {name} runs here")
    decoder = ENGINES[name].open(checkpoint)
    release_openmp_threads()  # loading has computed; the thread that decodes needs the cores
    if config.engine == "auto":
        log.info("engine: %s", decoder.name)
    if config.adapter is None and config.model is not None and not decoder.parallel:
        log.info("%s without an adapter answers sequentially", config.model)
    if decoder.warning is not None:
        log.warning("%s", decoder.warning)
    if not decoder.trained:
        joining = getattr(decoder, "joining", Joining.text)
        log.warning("the checkpoint was not trained for the join %s: expect worse text", joining)
    return decoder.limited_to(config.max_model_len)


def open_local(config: EngineConfig, cache: Path) -> LocalDecoder:
    """Load a checkpoint onto an engine in this process. Raises PastaError."""
    check_local(config)
    decoder: Any = open_decoder(config, cache)
    return decoder


def check_local(config: EngineConfig) -> None:
    """Raise PastaError if servers are to decode."""
    if config.is_remote:
        raise PastaError("this decodes in this process: leave out base_url and the engine remote")


def find(config: EngineConfig, cache: Path) -> Checkpoint:
    """Return the files that a config names. Raises PastaError for what is not there."""
    from pasta_decoding.models.load import (
        NO_ADAPTER,
        find_adapter,
        holds_weights,
        is_whole,
        known_base,
    )
    from pasta_decoding.models.pull import model_folder

    check_name("engine", config.engine, ["auto", *ENGINES])
    if config.whole is not None:
        return Checkpoint(config, config.whole, config.whole, cache)
    name = config.adapter_name
    adapter = None if name == NO_ADAPTER else find_adapter(name)
    if adapter is not None and holds_weights(adapter):  # without its `pasta.json`: loading says so
        return Checkpoint(config, adapter, adapter, cache)
    base = model_folder(config.model or Path(known_base(name)), cache)
    if config.model is not None and is_whole(base) and base.suffix != ".gguf":
        if config.adapter is not None:
            raise beside_whole(config.model)
        adapter = base
    return Checkpoint(config, base, adapter, cache)


def choose_engine(checkpoint: Checkpoint) -> str:
    """Return the engine that a checkpoint will be opened on."""
    asked = checkpoint.config.engine
    return asked if asked != "auto" else next(n for n, e in ENGINES.items() if e.suits(checkpoint))


def _known_dtype(checkpoint: Checkpoint, engine: str) -> str:
    """Return the number format that is asked for, unless torch's engines have none such."""
    asked = checkpoint.config.dtype
    if asked not in TORCH_DTYPES:
        raise PastaError(f"the {engine} engine has no number format {asked}", field="dtype")
    return asked


# torch


def _torch_dtype(checkpoint: Checkpoint) -> str:
    from pasta_decoding.models.load import native_dtype

    asked = _known_dtype(checkpoint, "torch")
    return native_dtype(checkpoint.device) if asked == "auto" else asked


def _open_torch(checkpoint: Checkpoint) -> LocalDecoder:
    from pasta_decoding.runtime.local import torch_decoder

    if checkpoint.is_gguf:
        raise PastaError("the torch engine does not read GGUF files")
    return torch_decoder(
        checkpoint.base,
        checkpoint.adapter,
        dtype=_torch_dtype(checkpoint),
        device=checkpoint.device,
        **checkpoint.sizes,
    )


# fast


def fast_can_run(checkpoint: Checkpoint) -> bool:
    """Is it a GGUF file, or is there a compiler, a known family and no llama.cpp on this CPU?

    Where the weights are a folder's, llama.cpp still takes less time on processors without AVX-512.
    """
    from pasta_decoding.engines.native import find_compiler

    if checkpoint.is_gguf:
        return True
    if checkpoint.config.dtype not in TORCH_DTYPES or llama_can_run(checkpoint):
        return False
    if checkpoint.device != "cpu" or find_compiler() is None:
        return False
    from transformers import AutoConfig

    from pasta_decoding.engines.fast import obstacle

    try:
        return obstacle(AutoConfig.from_pretrained(checkpoint.base)) is None
    except (OSError, ValueError, KeyError):  # loading says so
        return False


def _open_fast(checkpoint: Checkpoint) -> LocalDecoder:
    from pasta_decoding.runtime.local import fast_decoder

    dtype = _known_dtype(checkpoint, "fast")
    return fast_decoder(checkpoint.base, checkpoint.adapter, dtype=dtype, **checkpoint.sizes)


# llama


def gguf_type(dtype: str) -> str:
    """Return llama.cpp's name of a number format."""
    names = {"auto": "F16", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return names.get(dtype, dtype)


def llama_can_run(checkpoint: Checkpoint) -> bool:
    """Is llama.cpp installed, has it a translation of the model, and the adapter's positions?"""
    from pasta_decoding.engines.llama import library
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models import checkpoint as checkpoints
    from pasta_decoding.models.gguf import has_translation

    adapter = checkpoint.adapter
    try:
        if checkpoint.device != "cpu":
            return False
        library()
        known = adapter is None or scheme_named(checkpoints.load(adapter).scheme).consecutive
        return known and has_translation(checkpoint.base)
    except PastaError:  # loading reports a broken checkpoint
        return False


def _open_llama(checkpoint: Checkpoint) -> LocalDecoder:
    from pasta_decoding.engines.llama import library
    from pasta_decoding.models.export import cached_name
    from pasta_decoding.runtime.local import llama_decoder

    if checkpoint.is_gguf:
        if checkpoint.adapter != checkpoint.base:
            raise PastaError("the llama engine puts no adapter on a GGUF file: take --engine fast")
        return llama_decoder(checkpoint.base, **checkpoint.sizes)
    library()  # refuse a missing llama.cpp before the work
    base, adapter = checkpoint.base, checkpoint.adapter
    file_type = gguf_type(checkpoint.config.dtype)
    path = checkpoint.cache / "gguf" / f"{cached_name(base, adapter, file_type)}.gguf"
    if not path.exists():
        log.info("writing %s (once)", path)
        write_export(base, adapter, path, file_type)
    return llama_decoder(path, **checkpoint.sizes)


def write_export(base: Path, adapter: Path | None, path: Path, file_type: str) -> None:
    """Write a checkpoint as one GGUF file."""
    from pasta_decoding.engines.llama import library, quantize
    from pasta_decoding.models.export import export_gguf
    from pasta_decoding.models.gguf import FLOAT_TYPES
    from pasta_decoding.models.load import load_model

    if file_type not in FLOAT_TYPES:
        library()  # refuse a missing llama.cpp before the work
    loaded = load_model(base, adapter)
    if loaded.warning is not None:
        log.warning("%s", loaded.warning)
    export_gguf(loaded, path, file_type, quantize=quantize, progress=True)


# remote


def _open_remote(checkpoint: Checkpoint) -> RemoteDecoder:
    from pasta_decoding.remote.decoder import remote_decoder

    if checkpoint.is_gguf:
        raise PastaError("the remote engine needs the tokenizer's files: give --model their folder")
    config = checkpoint.config
    named = [config.adapter_name, *([] if config.model is None else [str(config.model)])]
    return remote_decoder(
        checkpoint.base,
        checkpoint.adapter,
        config.base_url,
        names=[*named, *(Path(name).name for name in named)],
        api_key=config.api_key,
        joining=config.join,
    )


ENGINES: Mapping[str, EngineKind] = {
    "remote": EngineKind(lambda one: bool(one.config.base_url), lambda _: None, _open_remote),
    "fast": EngineKind(fast_can_run, lambda one: _known_dtype(one, "fast"), _open_fast),
    "llama": EngineKind(llama_can_run, lambda one: gguf_type(one.config.dtype), _open_llama),
    "torch": EngineKind(lambda _: True, _torch_dtype, _open_torch),
}
"""All engines by name; `auto` takes the first one that suits."""
