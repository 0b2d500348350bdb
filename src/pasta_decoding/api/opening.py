"""From a config to a model that answers: which engine runs it, and how each engine is opened.

A new engine is a file in `engines/`, an entry of `ENGINES`, and a place in `choose_engine`.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pasta_decoding.api.config import EngineConfig, check_name, check_names
from pasta_decoding.api.model import Model
from pasta_decoding.engines.support import free_bytes, machine_load, release_openmp_threads
from pasta_decoding.errors import PastaError, errors_as, require
from pasta_decoding.files import writable
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.bases import default_cache
from pasta_decoding.models.catalog import (
    BaseWithAdapter,
    ModelSource,
    WholeModel,
    adapter_name,
    recorded_baseline,
    resolve,
)
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.load import default_device, load_gguf, load_model, native_dtype
from pasta_decoding.models.pretrained import load_config
from pasta_decoding.scheduling.decoder import Decoder, LocalDecoder, decoder_over

log = logging.getLogger(__name__)
BUSY_LOAD = 1.25
"""Threads that want a core, for each core, from which on other programs must be running."""
TORCH_DTYPES = ("auto", "float32", "bfloat16")
"""Number formats that the engines torch and fast compute in."""


@dataclass(frozen=True)
class ModelFiles:
    """The files that an engine opens, and how.

    cache: the user's cache, for exports and operators that are built on the way.
    """

    config: EngineConfig
    source: ModelSource
    cache: Path

    @property
    def is_gguf(self) -> bool:
        return self.source.weights.suffix == ".gguf"

    @cached_property
    def gguf(self) -> GgufFile:
        """The opened file, if `is_gguf`. Raises PastaError if it is broken."""
        return GgufFile(self.source.weights)

    @property
    def operators(self) -> Path:
        """The folder of the compiled operators of the engine fast."""
        return self.cache / "operators"

    @property
    def device(self) -> str:
        return self.config.device or default_device()


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How an engine is chosen and opened.

    ignores: fields of `EngineConfig` that have no meaning for it.
    suits:   may `auto` take it? Looks at checkpoint and machine, and loads nothing large.
    dtype:   the number format that it computes in; None if only a server knows.
    open:    load the checkpoint onto it. Raises PastaError.
    """

    ignores: Sequence[str]
    suits: Callable[[ModelFiles], bool]
    dtype: Callable[[ModelFiles], str | None]
    open: Callable[[ModelFiles], Decoder]


def load(
    adapter: str | Path | None = None, *, cache: str | Path | None = None, **settings: Any
) -> Model:
    """Load a checkpoint onto the best engine of this machine, or find the servers that have it.

    adapter:  a shipped adapter, the folder of an adapter or of a whole model, the name of a whole
              model on the hub, a GGUF file, or "none" for the base model alone. None: "balanced".
    cache:    folder of downloads and exports; PASTA_CACHE or the user's cache if left out.
    settings: the other fields of `EngineConfig`.

    The logger "pasta_decoding" reports what takes time. Raises PastaError for unknown adapters,
    models of another base, engines that are not installed, and broken files.
    """
    folder = default_cache(os.environ) if cache is None else Path(cache)
    settings |= {"adapter": adapter}
    check_names(EngineConfig, settings)
    config = EngineConfig(**settings)
    baseline = recorded_baseline(config.adapter, config.model, is_remote=config.is_remote)
    decoder = open_decoder(config, folder)
    if baseline is None:
        return Model(decoder)
    if baseline == config.adapter:
        return Model(replace(decoder, parallel=False))
    return Model(decoder, lambda: open_decoder(replace(config, adapter=baseline), folder))


def open_decoder(config: EngineConfig, cache: Path) -> Decoder:
    """Load a checkpoint onto an engine, or find the servers that have it. Raises PastaError."""
    files = find_files(config, cache)
    name = choose_engine(files)
    _refuse_ignored(config, name)
    if name != "remote":
        _check_memory(files, name)
    if config.threads is not None and name in ("fast", "torch"):
        import torch

        torch.set_num_threads(config.threads)  # of the whole process
    load_average, cores = machine_load()
    if name == "fast" and config.threads is None and load_average > BUSY_LOAD * cores:
        log.info("other programs keep the cores busy, and steps wait: try --threads 1")
    decoder = ENGINES[name].open(files)
    release_openmp_threads()  # loading has computed; the thread that decodes needs the cores
    if config.engine == "auto":
        log.info("engine: %s", decoder.name)
    if config.adapter is None and config.model is not None and not decoder.parallel:
        log.info("%s without an adapter answers sequentially", config.model)
    for warning in decoder.warnings:
        log.warning("%s", warning)
    return decoder.limited_to(config.max_model_len)


def find_files(config: EngineConfig, cache: Path) -> ModelFiles:
    """Return the files that a config names, fetched if need be. Raises PastaError if that fails."""
    return ModelFiles(config, resolve(config.adapter, config.model, cache), cache)


def _refuse_ignored(config: EngineConfig, engine: str) -> None:
    """Raise PastaError for a setting that the engine would ignore, unless it has its default."""
    if config.base_url and engine != "remote":
        raise PastaError(f"base_url names servers, and the engine {engine} runs here")
    for setting in fields(config):
        is_default = getattr(config, setting.name) in (setting.default, "cpu")
        if setting.name in ENGINES[engine].ignores and not is_default:
            raise PastaError(f"the engine {engine} takes no {setting.name}", field=setting.name)


def _check_memory(files: ModelFiles, engine: str) -> None:
    """Raise PastaError if the engine would hold weights larger than the free memory."""
    weights = files.source.weights
    needed_bytes = _held_bytes(files, engine)
    available_bytes = free_bytes()
    if needed_bytes > available_bytes:
        raise PastaError(
            f"the weights in {weights} take {needed_bytes / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB of memory are free: take a smaller model"
        )


def _held_bytes(files: ModelFiles, engine: str) -> int:
    """Return how much memory the weights take on an engine; those of a folder, as in their files.

    Without a C++ compiler, `fast` holds float32 as well.
    """
    from pasta_decoding.engines import native

    weights = files.source.weights
    if not files.is_gguf:
        return sum(file.stat().st_size for file in weights.glob("model*.safetensors"))
    if engine == "llama":
        return weights.stat().st_size
    if engine == "fast" and native.find_compiler() is not None:
        return native.held_bytes(files.gguf)
    number_bytes = 2 if engine == "torch" and _torch_dtype(files) == "bfloat16" else 4
    return number_bytes * sum(math.prod(tensor.shape) for tensor in files.gguf.tensors.values())


def open_local(config: EngineConfig, cache: Path) -> LocalDecoder:
    """As `open_decoder`, for an engine of this process; a config that names servers is refused."""
    check_local(config)
    return cast("LocalDecoder", open_decoder(config, cache))


def check_local(config: EngineConfig) -> None:
    if config.is_remote:
        raise PastaError("this decodes in this process: leave out base_url and the engine remote")


def choose_engine(files: ModelFiles) -> str:
    """Return the engine that the config names; for "auto", the first one that suits."""
    name = check_name("engine", files.config.engine, ["auto", *ENGINES])
    if name != "auto":
        return name
    if files.config.is_remote:
        return "remote"
    from pasta_decoding.engines.native import is_mostly_packed

    # On processors without AVX-512, llama.cpp takes less time for the weights of a folder. It also
    # takes less memory for those of a file that `fast` would hold in float32.
    order = ["llama", "fast", "torch"]
    if files.is_gguf and is_mostly_packed(files.gguf):
        order = ["fast", "llama", "torch"]
    return next(name for name in order if ENGINES[name].suits(files))


def _checked_dtype(files: ModelFiles, engine: str) -> str:
    """Return the number format. Raises PastaError for a format that torch cannot compute in."""
    dtype = files.config.dtype
    if dtype not in TORCH_DTYPES:
        raise PastaError(f"the {engine} engine has no number format {dtype}", field="dtype")
    return dtype


def _torch_dtype(files: ModelFiles) -> str:
    dtype = _checked_dtype(files, "torch")
    return native_dtype(files.device) if dtype == "auto" else dtype


def _open_torch(files: ModelFiles) -> LocalDecoder:
    """Load onto the torch engine. Raises PastaError if the device is not there or has no room."""
    from pasta_decoding.engines.torch import TorchEngine

    loaded = load_model(files.source, dtype=_torch_dtype(files))
    message = f"cannot put the model on the device {files.device!r}, as --device cpu can"
    with errors_as(message, RuntimeError, AssertionError):  # torch without CUDA asserts
        loaded.model.to(files.device)
    engine = TorchEngine(loaded.model, cache_tokens=files.config.cache_tokens)
    return decoder_over(engine, loaded, files.config.join)


def fast_can_run(files: ModelFiles) -> bool:
    """Are there operators for this CPU, and a GGUF file or a model of a known family?"""
    from pasta_decoding.engines.fast import obstacle
    from pasta_decoding.engines.native import find_compiler, load_operators

    if files.device != "cpu" or files.config.dtype not in TORCH_DTYPES or find_compiler() is None:
        return False
    if not files.is_gguf and obstacle(load_config(files.source.weights)):
        return False
    return load_operators(files.operators) is not None


def _open_fast(files: ModelFiles) -> LocalDecoder:
    """Load onto the fast engine. Weights of a GGUF file stay as they are; no adapter is merged."""
    import torch

    from pasta_decoding.engines.fast import FastEngine
    from pasta_decoding.engines.weights import ModelWeights

    dtype = _checked_dtype(files, "fast")
    if files.is_gguf:
        loaded = load_gguf(files.gguf, files.source)
        weights = ModelWeights(loaded.model, loaded.layer_updates, files.gguf)
    else:
        loaded = load_model(files.source, dtype=dtype)
        weights = ModelWeights(loaded.model)
    cache_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    engine = FastEngine(
        weights,
        cache_tokens=files.config.cache_tokens,
        cache_dtype=cache_dtype,
        operators=files.operators,
    )
    return decoder_over(engine, loaded, files.config.join)


def gguf_type(dtype: str) -> str:
    """Return the GGUF file type of a number format of `EngineConfig`."""
    names = {"auto": "F16", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return names.get(dtype, dtype)


def llama_can_run(files: ModelFiles) -> bool:
    """Is llama.cpp installed, and does it have the model's family and the adapter's positions?"""
    from pasta_decoding.engines.llama import load_library
    from pasta_decoding.models.gguf_writer import has_translation

    source = files.source
    try:
        if files.device != "cpu":
            return False
        load_library()
        if _is_one_gguf(source):
            return True
        path = source.checkpoint_path
        if path is not None and not scheme_named(read_checkpoint(path).scheme).consecutive:
            return False
        return files.is_gguf or has_translation(source.weights)
    except PastaError:  # loading reports a broken checkpoint
        return False


def _open_llama(files: ModelFiles) -> LocalDecoder:
    """Load one GGUF file onto the llama engine; another checkpoint is first exported, once."""
    from pasta_decoding.engines.llama import LlamaEngine, load_library
    from pasta_decoding.models.export import cached_name

    config = files.config
    source = files.source
    load_library()  # refuse a missing llama.cpp before the work
    path = source.weights
    if not _is_one_gguf(source):
        file_type = gguf_type(config.dtype)
        path = files.cache / "gguf" / f"{cached_name(source, file_type)}.gguf"
        if not path.exists():
            path = writable(path.parent, "the exported model") / path.name
            log.info("writing %s (once)", path)
            write_export(source, path, file_type)
    loaded = load_gguf(GgufFile(path), WholeModel(path))
    engine = LlamaEngine(path, cache_tokens=config.cache_tokens, threads=config.threads)
    return decoder_over(engine, loaded, config.join)


def _is_one_gguf(source: ModelSource) -> bool:
    return source.weights.suffix == ".gguf" and not isinstance(source, BaseWithAdapter)


def write_export(source: ModelSource, path: Path, file_type: str) -> None:
    """Write a model as one GGUF file; an adapter is merged. Raises PastaError as loading does."""
    from pasta_decoding.engines.llama import load_library, quantize
    from pasta_decoding.models.export import export_gguf
    from pasta_decoding.models.gguf_writer import FLOAT_TYPES

    if file_type not in FLOAT_TYPES:
        load_library()  # refuse a missing llama.cpp before the work
    loaded = load_model(source)
    if loaded.warning is not None:
        log.warning("%s", loaded.warning)
    export_gguf(loaded, path, file_type, quantize=quantize)


def _open_remote(files: ModelFiles) -> Decoder:
    require("httpx2", extra="remote", doing="the remote engine")
    from pasta_decoding.remote.decoder import remote_decoder

    config = files.config
    names = [adapter_name(config.adapter, config.model)]
    if config.model is not None:
        names.append(str(config.model))
    return remote_decoder(
        files.source,
        config.base_url,
        names=[*names, *(Path(name).name for name in names)],
        api_key=config.api_key,
        joining=config.join,
    )


ENGINES: Mapping[str, EngineKind] = {
    "remote": EngineKind(
        ignores=("cache_tokens", "device", "dtype", "threads"),
        suits=lambda files: files.config.is_remote,
        dtype=lambda _files: None,
        open=_open_remote,
    ),
    "fast": EngineKind(
        ignores=("device",),
        suits=fast_can_run,
        dtype=lambda files: _checked_dtype(files, "fast"),
        open=_open_fast,
    ),
    "llama": EngineKind(
        ignores=("device",),
        suits=llama_can_run,
        dtype=lambda files: gguf_type(files.config.dtype),
        open=_open_llama,
    ),
    "torch": EngineKind(
        ignores=(),
        suits=lambda _files: True,
        dtype=_torch_dtype,
        open=_open_torch,
    ),
}
