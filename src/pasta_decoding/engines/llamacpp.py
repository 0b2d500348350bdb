"""llama.cpp as a library, through llama-cpp-python's low-level API: models, contexts, quantiser."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pasta_decoding.engines.support import refuse_large_cache, usable_cores
from pasta_decoding.errors import PastaError, install_command

LOG_LEVEL_ERROR = 4  # of ggml
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ, compiled into llama.cpp
BATCH_TOKENS = 512
CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of this
CacheType = Literal["F16", "F32"]

# What llama.cpp said last; its log is one for the whole process.
errors: deque[str] = deque(maxlen=3)
_callbacks: list[object] = []  # ctypes frees what nobody holds


@cache
def library() -> ModuleType:
    """Return `llama_cpp`, ready. Raises PastaError with the install command when it is missing."""
    try:
        import llama_cpp
    except ImportError as error:
        raise PastaError(
            f"the llama engine needs llama-cpp-python, which cannot be imported: {error}",
            hint=f"{install_command('llama')} (it compiles llama.cpp, about ten minutes)",
        ) from error

    def note(level: int, text: bytes, _: object) -> None:
        if level == LOG_LEVEL_ERROR:
            errors.append(text.decode(errors="replace").strip())

    _callbacks.append(llama_cpp.llama_log_callback(note))
    llama_cpp.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def load_model(path: Path) -> Any:
    """Load a GGUF file. Raises PastaError for anything else."""
    llama = library()
    errors.clear()
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise PastaError(f"cannot read {path}: {error}") from error
    parameters = llama.llama_model_default_params()
    # Its kernels for AMX end in a segmentation fault on some machines (ggml-org/llama.cpp#20824),
    # and want a copy of the weights beside the file.
    parameters.use_extra_bufts = b"AMX_INT8 = 1" not in llama.llama_print_system_info()
    model = magic == b"GGUF" and llama.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        said = "; ".join(errors) or "it does not begin like one"
        raise PastaError(f"{path} is not a GGUF file that llama.cpp can load: {said}")
    return model


def make_context(model: Any, tokens: int, threads: int | None, cache_type: CacheType) -> Any:
    """Make a context with one cache for all sequences. Raises PastaError without memory for it.

    threads: None takes all cores that the process may use.
    """
    llama = library()
    refuse_large_cache(tokens, _token_bytes(llama, model, cache_type))
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
    parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
    parameters.n_seq_max = MAX_SEQUENCES
    parameters.kv_unified = True
    parameters.n_threads = parameters.n_threads_batch = threads or usable_cores()
    ggml_type = {"F32": 0, "F16": 1}[cache_type]
    parameters.type_k = parameters.type_v = ggml_type
    if cache_type == "F32":  # flash attention would round to F16 on the way
        parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise PastaError(f"no memory for a context of {tokens} tokens")
    return context


def _token_bytes(llama: ModuleType, model: Any, cache_type: CacheType) -> int:
    """Return what a token's keys and values take, unless heads are wider than usual."""
    width = llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
    numbers = 2 * llama.llama_model_n_layer(model) * llama.llama_model_n_head_kv(model) * width
    return int(numbers) * {"F32": 4, "F16": 2}[cache_type]


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write the GGUF `source` to `target` as Q8_0, Q4_K_M, ..., with llama.cpp's own quantiser."""
    llama = library()
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    errors.clear()
    if llama.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(parameters)
    ):
        raise PastaError(f"llama.cpp could not quantise {source}: {'; '.join(errors)}")


def free(library: ModuleType, batch: Any, context: Any, model: Any) -> None:
    """Free what an engine took, in this order."""
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)
