"""llama.cpp, through llama-cpp-python's low-level API: one llama sequence a branch.

The context has one unified cache. A fork copies a sequence, which marks cells and moves no key; a
join copies the children's sequences into the parent's. Attention sees, of the cells of a token's
sequence, those at positions up to its own, so a branch must go on at 1 + the largest position
that it sees (`free_positions` is False): llama.cpp refuses gaps.

Shapes: F feeds that want logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import CachedEngine
from pasta_decoding.engines.support import refuse_large_cache, usable_cores
from pasta_decoding.errors import PastaError, install_command

LOG_LEVEL_ERROR = 4  # of ggml
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ, compiled into llama.cpp
BATCH_TOKENS = 512
CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of this
CacheType = Literal["F16", "F32"]

_errors: deque[str] = deque(maxlen=3)  # what llama.cpp said last, in the whole process
_callbacks: list[object] = []  # ctypes frees what nobody holds


@cache
def load_library() -> ModuleType:
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
            _errors.append(text.decode(errors="replace").strip())

    _callbacks.append(llama_cpp.llama_log_callback(note))
    llama_cpp.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write the GGUF `source` to `target` as Q8_0, Q4_K_M, ..., with llama.cpp's own quantiser."""
    llama = load_library()
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    _errors.clear()
    paths = (str(source).encode(), str(target).encode())
    if llama.llama_model_quantize(*paths, ctypes.byref(parameters)):
        raise PastaError(f"llama.cpp could not quantise {source}: {'; '.join(_errors)}")


def _load_model(llama: ModuleType, path: Path) -> Any:
    """Load a GGUF file. Raises PastaError for anything else."""
    _errors.clear()
    parameters = llama.llama_model_default_params()
    # Its kernels for AMX end in a segmentation fault on some machines (ggml-org/llama.cpp#20824),
    # and want a copy of the weights beside the file.
    parameters.use_extra_bufts = b"AMX_INT8 = 1" not in llama.llama_print_system_info()
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise PastaError(f"{path} is not a GGUF file that llama.cpp can load: {'; '.join(_errors)}")
    return model


def _make_context(
    llama: ModuleType, model: Any, tokens: int, threads: int | None, cache_type: CacheType
) -> Any:
    """Make a context with one cache for all sequences. Raises PastaError without memory for it."""
    # What a token's keys and values take, unless heads are wider than usual.
    width = llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
    numbers = 2 * llama.llama_model_n_layer(model) * llama.llama_model_n_head_kv(model) * width
    refuse_large_cache(tokens, numbers * (4 if cache_type == "F32" else 2))
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
    parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
    parameters.n_seq_max, parameters.kv_unified = MAX_SEQUENCES, True
    parameters.n_threads = parameters.n_threads_batch = threads or usable_cores()
    parameters.type_k = parameters.type_v = {"F32": 0, "F16": 1}[cache_type]  # ggml's numbers
    if cache_type == "F32":  # flash attention would round to F16 on the way
        parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise PastaError(f"no memory for a context of {tokens} tokens")
    return context


def _free(llama: ModuleType, batch: Any, context: Any, model: Any) -> None:
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)


class LlamaEngine(CachedEngine):
    """Implements `Engine` on a GGUF file.

    cache_tokens: tokens that all open requests together may hold.
    threads:      processor threads; None takes all cores that the process may use.
    cache_type:   of keys and values. F32 is for comparisons with the torch engine.

    `library` and `context` are llama.cpp's own, for measurements without the engine.
    """

    free_positions = False

    def __init__(
        self,
        path: Path,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        threads: int | None = None,
        cache_type: CacheType = "F16",
    ) -> None:
        self.library = llama = load_library()
        self._model = model = _load_model(llama, path)
        try:
            self.context = _make_context(llama, model, cache_tokens, threads, cache_type)
        except PastaError:
            llama.llama_model_free(model)
            raise
        self._batch_tokens = int(llama.llama_n_batch(self.context))
        self._memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(self._batch_tokens, 0, MAX_SEQUENCES)
        weakref.finalize(self, _free, llama, self._batch, self.context, model)
        # Most matrices' format, from a description like "llama 1B Q4_K - Medium".
        buffer = ctypes.create_string_buffer(128)
        llama.llama_model_desc(model, buffer, 128)
        form = buffer.value.decode().split(maxsplit=2)[-1].removeprefix("all ")
        self.name = f"llama {form.replace(' - Medium', '_M')}"
        slots = int(llama.llama_n_ctx(self.context))
        vocabulary_size = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        positions = min(int(llama.llama_model_n_ctx_train(model)), slots)
        limits = Limits(vocabulary_size, positions, slots, MAX_SEQUENCES)
        super().__init__(limits, in_one_piece=False)
        self._sequences: dict[Branch, int] = {}
        self._free_sequences = list(range(MAX_SEQUENCES))

    def open(self, *, reserved_tokens: int) -> Branch:
        branch = super().open(reserved_tokens=reserved_tokens)
        self._sequences[branch] = self._free_sequences.pop()
        return branch

    def fork(self, parent: Branch) -> Branch:
        child = super().fork(parent)
        self._sequences[child] = self._free_sequences.pop()
        self._mark(parent, child)
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        for child in children:
            self._mark(child, parent)
        super().join(parent, children)

    def close(self, branch: Branch) -> None:
        super().close(branch)
        sequence = self._sequences.pop(branch)
        self.library.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free_sequences.append(sequence)

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        # No key is copied: both sequences mark the same cells.
        self.mark_copied(source, target, tokens)
        self._mark(source, target, tokens)

    def shrink(self, branch: Branch, tokens: int) -> None:
        super().shrink(branch, tokens)
        self.library.llama_memory_seq_rm(self._memory, self._sequences[branch], tokens, -1)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """More tokens than a batch takes are decoded in several."""
        wanted = len(self.plan(feeds).logits_tokens)
        logits_FV: FloatArray = np.empty((wanted, self.vocabulary_size), dtype=np.float32)
        rows, batch = iter(logits_FV), self._batch
        batch.n_tokens = 0
        for feed in feeds:
            sequences = [self._sequences[branch] for branch in feed.branches]
            for token, position in zip(feed.ids, feed.positions, strict=True):
                if batch.n_tokens == self._batch_tokens:
                    self._decode(rows)
                i = batch.n_tokens
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, 0
                batch.n_seq_id[i] = len(sequences)
                for n, sequence in enumerate(sequences):
                    batch.seq_id[i][n] = sequence
                batch.n_tokens = i + 1
            batch.logits[batch.n_tokens - 1] = feed.wants_logits
        if batch.n_tokens:
            self._decode(rows)
        return logits_FV

    def _decode(self, rows: Iterator[FloatArray]) -> None:
        """Decode what the batch holds, empty it, and fill a row for each logits_V wanted of it."""
        batch = self._batch
        _errors.clear()
        if status := self.library.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}: {'; '.join(_errors)}")
        for i in range(batch.n_tokens):
            if batch.logits[i]:
                pointer = self.library.llama_get_logits_ith(self.context, i)
                next(rows)[:] = np.ctypeslib.as_array(pointer, (self.vocabulary_size,))
        batch.n_tokens = 0

    def _mark(self, source: Branch, target: Branch, end: int = -1) -> None:
        """Let a branch see the cells of another, at positions below `end` unless that is -1."""
        given, taken = self._sequences[source], self._sequences[target]
        self.library.llama_memory_seq_cp(self._memory, given, taken, 0, end)
