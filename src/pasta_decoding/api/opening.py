"""From settings to a decoder: which engine is taken, and what is made for it on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.api.compiled import Compiled, anything_compiled, compiled_pass, ready
from pasta_decoding.api.config import EngineConfig, beside_whole
from pasta_decoding.api.place import Place, Tell
from pasta_decoding.engines.support import release_openmp_threads
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.engines.compiled import CompiledPass
    from pasta_decoding.remote.decoder import RemoteDecoder
    from pasta_decoding.runtime.decoder import Decoder
    from pasta_decoding.runtime.local import LocalDecoder

FASTER = {
    "compiled": ", the fastest on this processor",
    "llama": "; once `pasta compile` has run, a second thread costs less",
    "torch": "; on a CPU, `pasta compile` makes it faster",
}
"""What is said of the engine that `auto` took."""


def open_decoder(settings: EngineConfig, place: Place) -> LocalDecoder | RemoteDecoder:
    """Load the checkpoint onto the engine, or find the servers that have it. Raises PastaError."""
    if settings.is_remote:
        return open_remote(settings, place)
    return open_local(settings, place)


def check_local(settings: EngineConfig, place: Place) -> None:
    """Raise PastaError if no engine in this process could have what is named."""
    if settings.is_remote:
        raise PastaError(
            "servers are no engine of this process",
            hint="Leave out base_url and the engine remote: this decodes here.",
        )
    if settings.base_url:
        raise PastaError(
            f"base_url names servers, and the engine {settings.engine} runs here",
            hint="Leave one of them out.",
        )
    folders(settings, place)


def open_local(settings: EngineConfig, place: Place) -> LocalDecoder:
    """Load base model and adapter onto an engine in this process. Raises PastaError."""
    check_local(settings, place)
    decoder = _load(settings, place)
    release_openmp_threads()  # loading computes, too; the thread that will decode needs the cores
    if settings.engine == "auto":
        name = decoder.engine.name
        place.tell(f"engine: {name}{FASTER.get(name.partition(' ')[0], '')}")
    _warn(decoder, decoder.joining, place)
    return decoder.limited_to(settings.max_model_len)


def open_remote(settings: EngineConfig, place: Place) -> RemoteDecoder:
    """Find the servers that have the checkpoint. Raises PastaError."""
    from pasta_decoding.remote.decoder import remote_decoder

    if settings.whole is not None and settings.whole.suffix == ".gguf":
        raise PastaError(
            "the remote engine needs the tokenizer's files",
            hint="Give --model the folder that is served, or leave it out.",
        )
    base, folder = folders(settings, place)
    model = [] if settings.model is None else [str(settings.model)]
    named = [settings.adapter_name, *model]
    decoder = remote_decoder(
        base,
        folder,
        settings.base_url,
        names=[*named, *(Path(name).name for name in named)],
        api_key=settings.api_key,
        joining=settings.join,
    )
    _warn(decoder, Joining.text, place)
    return decoder.limited_to(settings.max_model_len)


def gguf_type(dtype: str) -> str:
    """Return llama.cpp's name of a number format."""
    names = {"auto": "F16", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return names.get(dtype, dtype)


def _warn(decoder: Decoder, joining: Joining, place: Place) -> None:
    """Tell where a checkpoint is used as it was not trained to be."""
    if decoder.warning is not None:
        place.tell(decoder.warning)
    if not decoder.trained:
        place.tell(f"the checkpoint was not trained for the join {joining}: expect worse text")


def _load(settings: EngineConfig, place: Place) -> LocalDecoder:
    from pasta_decoding.models.load import default_device
    from pasta_decoding.runtime.local import llama_decoder, torch_decoder

    size: Any = {
        "cache_tokens": settings.cache_tokens,
        "threads": settings.threads,
        "joining": settings.join,
    }
    if settings.whole is not None and settings.whole.suffix == ".gguf":
        _refuse_torch(settings)
        return llama_decoder(settings.whole, **size)
    base, folder = folders(settings, place)
    engine, number_format = choose_engine(settings, base, folder, place)
    device = "cpu" if engine != "torch" else settings.device or default_device()
    if device == "cpu":  # others say themselves what does not fit
        _refuse_large_cache(settings.cache_tokens, base, 4 if number_format == "float32" else 2)
    if engine == "llama":
        return llama_decoder(exported(base, folder, gguf_type(settings.dtype), place), **size)
    if engine == "compiled":
        wanted = Compiled(base, folder, number_format, settings.threads)
        compiled = _program(wanted, place, may_go_without=settings.engine == "auto")
        return torch_decoder(base, folder, dtype=number_format, compiled=compiled, **size)
    return torch_decoder(base, folder, dtype=number_format, device=device, **size)


def _refuse_large_cache(cells: int, base: Path, number_bytes: int) -> None:
    """Raise PastaError for a cache that has no room here, before anything large is read."""
    from pasta_decoding.engines.support import numbers_per_token, refuse_large_cache

    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # told by loading
    numbers = numbers_per_token(config) if isinstance(config, dict) else None
    if numbers is not None:
        refuse_large_cache(cells, numbers * number_bytes)


def _program(wanted: Compiled, place: Place, *, may_go_without: bool) -> CompiledPass | None:
    try:
        return compiled_pass(wanted, place)
    except PastaError as error:  # a full /tmp, say, where torch unpacks it
        if not may_go_without:
            raise
        place.tell(f"{error}. {error.hint}")
        return None


def folders(settings: EngineConfig, place: Place) -> tuple[Path, Path | None]:
    """Return where the weights of the model are, and the adapter's folder if there is one.

    Of a whole model they are the same. Raises PastaError if more is named beside one.
    """
    from pasta_decoding.models.load import NO_ADAPTER, find_adapter, holds_weights, is_whole

    if settings.whole is not None:
        return settings.whole, settings.whole
    folder = None if settings.adapter_name == NO_ADAPTER else find_adapter(settings.adapter_name)
    if folder is not None and holds_weights(folder):  # without its `pasta.json`: told on loading
        return folder, folder
    base = base_folder(settings.model, place)
    if settings.model is None or not is_whole(base):
        return base, folder
    if settings.adapter is not None:
        raise beside_whole(settings.model)
    return base, base


def base_folder(model: Path | None, place: Place) -> Path:
    """Return the folder of a base model: a folder, a name on the hub, or None: the default one."""
    from pasta_decoding.models.pull import model_folder

    return model_folder(model, place.cache, place.tell)


def choose_engine(
    settings: EngineConfig, weights: Path, adapter: Path | None, place: Place
) -> tuple[str, str]:
    """Return the engine that will be taken for these weights, and its number format."""
    from pasta_decoding.models.load import default_device, native_dtype

    if settings.engine == "llama":
        return "llama", gguf_type(settings.dtype)
    compiled = settings.engine == "compiled"
    device = "cpu" if compiled else settings.device or default_device()

    def dtype() -> str:  # asks torch, which llama need not load
        return native_dtype(device) if settings.dtype == "auto" else settings.dtype

    if settings.engine == "auto" and device == "cpu":
        # What is compiled to float32 reads twice as much as llama does: it is taken if asked for.
        rounded = anything_compiled(place.cache) and dtype() == "bfloat16"
        if rounded and ready(Compiled(weights, adapter, "bfloat16", settings.threads), place):
            return "compiled", "bfloat16"
        if llama_can_run(weights, adapter):
            return "llama", gguf_type(settings.dtype)
    return "compiled" if compiled else "torch", dtype()


def worth_compiling(settings: EngineConfig, place: Place) -> Compiled | None:
    """Return what the torch engine would be faster with, or None: `settings` take another engine.

    None, too, where it is compiled already, and where `auto` finds no compiler or bfloat16 is slow.
    Raises PastaError if the engine `compiled` is asked for and there is no compiler.
    """
    asked = settings.engine == "compiled"
    if settings.is_remote or not (asked or settings.engine == "auto"):
        return None
    if settings.whole is not None and settings.whole.suffix == ".gguf":
        return None
    from pasta_decoding.engines.compiled import check_compiler
    from pasta_decoding.models.load import default_device

    base, folder = folders(settings, place)
    engine, dtype = choose_engine(settings, base, folder, place)
    on_cpu = asked or (settings.device or default_device()) == "cpu"
    wanted = Compiled(base, folder, dtype, settings.threads)
    slow = not asked and (engine != "torch" or dtype != "bfloat16")
    if slow or not on_cpu or ready(wanted, place):
        return None
    try:
        check_compiler()
    except PastaError:
        if asked:
            raise
        return None
    return wanted


def _refuse_torch(settings: EngineConfig) -> None:
    if settings.engine in ("torch", "compiled"):
        raise PastaError(
            "the torch engine does not read GGUF files",
            hint="Leave --engine out, or give --model a Hugging Face folder.",
        )


def llama_can_run(weights: Path, adapter: Path | None) -> bool:
    """Is llama.cpp installed, has it a translation of the model, and the adapter's positions?"""
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models import checkpoint as checkpoints
    from pasta_decoding.models.gguf import has_translation

    try:
        library()
        known = adapter is None or scheme_named(checkpoints.load(adapter).scheme).consecutive
        return known and has_translation(weights)
    except PastaError:  # a broken checkpoint is told by whoever loads it
        return False


def exported(base: Path, adapter: Path | None, file_type: str, place: Place) -> Path:
    """Return the checkpoint as a GGUF in the user's cache, made now if it is not there."""
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.models.export import cached_name

    library()  # its absence is told before the work
    path = place.cache / "gguf" / f"{cached_name(base, adapter, file_type)}.gguf"
    if not path.exists():
        place.tell(f"writing {path} (once)")
        write_export(base, adapter, path, file_type, place.tell)
    return path


def write_export(base: Path, adapter: Path | None, path: Path, file_type: str, tell: Tell) -> None:
    """Write a checkpoint as one GGUF file."""
    from pasta_decoding.engines.llamacpp import library, quantize
    from pasta_decoding.models.export import export_gguf
    from pasta_decoding.models.gguf import FLOAT_TYPES
    from pasta_decoding.models.load import load_model

    if file_type not in FLOAT_TYPES:
        library()  # its absence is told before the work
    loaded = load_model(base, adapter)
    if loaded.warning is not None:
        tell(loaded.warning)
    export_gguf(loaded, path, file_type, quantize=quantize, progress=True)
