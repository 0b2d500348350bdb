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
GGML_TYPES = {"F32": 0, "F16": 1}

_errors: deque[str] = deque(maxlen=3)  # llama.cpp's last messages, in the whole process
_callbacks: list[object] = []  # ctypes frees a callback that nothing refers to


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

    def record_error(level: int, text: bytes, _: object) -> None:
        if level == LOG_LEVEL_ERROR:
            _errors.append(text.decode(errors="replace").strip())

    _callbacks.append(llama_cpp.llama_log_callback(record_error))
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
    # A token's keys and values, unless heads are wider than usual.
    head_width = llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
    kv_width = llama.llama_model_n_head_kv(model) * head_width
    numbers = 2 * llama.llama_model_n_layer(model) * kv_width
    refuse_large_cache(tokens, numbers * (4 if cache_type == "F32" else 2))
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
    parameters.n_batch = BATCH_TOKENS
    parameters.n_ubatch = BATCH_TOKENS
    parameters.n_seq_max = MAX_SEQUENCES
    parameters.kv_unified = True
    parameters.n_threads = threads or usable_cores()
    parameters.n_threads_batch = parameters.n_threads
    parameters.type_k = GGML_TYPES[cache_type]
    parameters.type_v = GGML_TYPES[cache_type]
    if cache_type == "F32":  # flash attention would round to F16 on the way
        parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise PastaError(f"no memory for a context of {tokens} tokens")
    return context


def _number_format(llama: ModuleType, model: Any) -> str:
    """Return the format of most matrices, from a description like "llama 1B Q4_K - Medium"."""
    buffer = ctypes.create_string_buffer(128)
    llama.llama_model_desc(model, buffer, len(buffer))
    form = buffer.value.decode().split(maxsplit=2)[-1]
    return form.removeprefix("all ").replace(" - Medium", "_M")


def _free(llama: ModuleType, batch: Any, context: Any, model: Any) -> None:
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)


class LlamaEngine(CachedEngine):
    """Implements `Engine` on a GGUF file.

    cache_tokens: tokens that all open requests together may hold.
    threads:      processor threads; None takes all cores that the process may use.
    cache_type:   of keys and values. F32 is for comparisons with the torch engine.

    `library` and `context` are those of llama.cpp, for measurements without the engine.
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
        llama = load_library()
        model = _load_model(llama, path)
        self.library = llama
        try:
            self.context = _make_context(llama, model, cache_tokens, threads, cache_type)
        except PastaError:
            llama.llama_model_free(model)
            raise
        self._batch_tokens = int(llama.llama_n_batch(self.context))
        self._memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(self._batch_tokens, 0, MAX_SEQUENCES)
        weakref.finalize(self, _free, llama, self._batch, self.context, model)
        self.name = f"llama {_number_format(llama, model)}"
        vocabulary = llama.llama_model_get_vocab(model)
        max_slots = int(llama.llama_n_ctx(self.context))
        limits = Limits(
            vocabulary_size=int(llama.llama_vocab_n_tokens(vocabulary)),
            max_positions=min(int(llama.llama_model_n_ctx_train(model)), max_slots),
            max_slots=max_slots,
            max_branches=MAX_SEQUENCES,
        )
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
        """Decode in several batches if there are more tokens than one takes."""
        rows = len(self.plan(feeds).logits_tokens)
        logits_FV: FloatArray = np.empty((rows, self.vocabulary_size), dtype=np.float32)
        empty_rows = iter(logits_FV)
        batch = self._batch
        batch.n_tokens = 0
        for feed in feeds:
            sequences = [self._sequences[branch] for branch in feed.branches]
            for token, position in zip(feed.ids, feed.positions, strict=True):
                if batch.n_tokens == self._batch_tokens:
                    self._decode(empty_rows)
                index = batch.n_tokens
                batch.token[index] = token
                batch.pos[index] = position
                batch.logits[index] = 0
                batch.n_seq_id[index] = len(sequences)
                for number, sequence in enumerate(sequences):
                    batch.seq_id[index][number] = sequence
                batch.n_tokens = index + 1
            batch.logits[batch.n_tokens - 1] = feed.wants_logits
        if batch.n_tokens:
            self._decode(empty_rows)
        return logits_FV

    def _decode(self, empty_rows: Iterator[FloatArray]) -> None:
        """Decode the batch, fill the next rows with the logits that it asks for, and empty it."""
        batch = self._batch
        _errors.clear()
        if status := self.library.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}: {'; '.join(_errors)}")
        for index in range(batch.n_tokens):
            if batch.logits[index]:
                pointer = self.library.llama_get_logits_ith(self.context, index)
                next(empty_rows)[:] = np.ctypeslib.as_array(pointer, (self.vocabulary_size,))
        batch.n_tokens = 0

    def _mark(self, source: Branch, target: Branch, end: int = -1) -> None:
        """Let a branch see the cells of another, at positions below `end` unless that is -1."""
        self.library.llama_memory_seq_cp(
            self._memory, self._sequences[source], self._sequences[target], 0, end
        )
