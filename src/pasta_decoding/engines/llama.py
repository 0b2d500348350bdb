"""llama.cpp, through llama-cpp-python's low-level API: one llama sequence a branch.

The context has one unified cache. A fork copies a sequence, which marks cells and moves no key; a
join copies the children's sequences into the parent's. Attention sees, of the cells of a token's
sequence, those at positions up to its own, so a branch must go on at 1 + the largest position
that it sees (`free_positions` is False).

Shapes: F feeds that want logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import KVCache
from pasta_decoding.engines.llamacpp import (
    MAX_SEQUENCES,
    CacheType,
    errors,
    free,
    library,
    load_model,
    make_context,
)
from pasta_decoding.errors import PastaError


class LlamaEngine:
    """Implements `Engine` on a GGUF file.

    cache_tokens: tokens that all open requests together may hold.
    threads:      processor threads; None takes all cores that the process may use.
    cache_type:   of keys and values. F32 is for comparisons with the torch engine.

    `library` and `context` are llama.cpp's own, for measurements without the engine.
    """

    free_positions = False  # llama.cpp refuses a sequence with gaps

    def __init__(
        self,
        path: Path,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        threads: int | None = None,
        cache_type: CacheType = "F16",
    ) -> None:
        self.library = llama = library()
        self.path = path
        self._model = load_model(path)
        try:
            self.context = make_context(self._model, cache_tokens, threads, cache_type)
        except PastaError:
            llama.llama_model_free(self._model)
            raise
        self._batch_tokens = int(llama.llama_n_batch(self.context))
        self._memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(self._batch_tokens, 0, MAX_SEQUENCES)
        weakref.finalize(self, free, llama, self._batch, self.context, self._model)
        self.name = f"llama {self._file_type()}"
        vocabulary = llama.llama_model_get_vocab(self._model)
        self.vocabulary_size = int(llama.llama_vocab_n_tokens(vocabulary))
        self.max_slots = int(llama.llama_n_ctx(self.context))
        trained = int(llama.llama_model_n_ctx_train(self._model))
        self.max_positions, self.max_branches = min(trained, self.max_slots), MAX_SEQUENCES
        limits = Limits(self.vocabulary_size, trained, self.max_slots, self.max_branches)
        self._cache = KVCache(limits, in_one_piece=False)
        self._sequences: dict[Branch, int] = {}
        self._free_sequences = list(range(MAX_SEQUENCES))

    def _file_type(self) -> str:
        """Return most matrices' format, from a description like "llama 1B Q4_K - Medium"."""
        buffer = ctypes.create_string_buffer(128)
        self.library.llama_model_desc(self._model, buffer, 128)
        form = buffer.value.decode().split(maxsplit=2)[-1].removeprefix("all ")
        return form.replace(" - Medium", "_M")

    @property
    def slots_in_use(self) -> int:
        return self._cache.slots_in_use

    def open(self, *, reserved_tokens: int) -> Branch:
        branch = self._cache.open(reserved_tokens)
        self._sequences[branch] = self._free_sequences.pop()
        return branch

    def fork(self, parent: Branch) -> Branch:
        child = self._cache.fork(parent)
        self._sequences[child] = self._free_sequences.pop()
        self._mark(parent, child)
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        self._cache.join(parent, children)
        for child in children:
            self._mark(child, parent)
            self._forget(child)

    def close(self, branch: Branch) -> None:
        self._cache.close(branch)
        self._forget(branch)

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        """See `Engine`. No key is copied: both sequences mark the same cells."""
        self._cache.copy(source, target, tokens)
        self._mark(source, target, tokens)

    def shrink(self, branch: Branch, tokens: int) -> None:
        self._cache.shrink(branch, tokens)
        self.library.llama_memory_seq_rm(self._memory, self._sequences[branch], tokens, -1)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. More tokens than a batch takes are decoded in several."""
        self._check_positions(feeds)
        wanted = len(self._cache.plan(feeds).wanted)
        logits_FV: FloatArray = np.empty((wanted, self.vocabulary_size), dtype=np.float32)
        rows, batch = iter(logits_FV), self._batch
        batch.n_tokens = 0
        for feed in feeds:
            sequences = [self._sequences[branch] for branch in feed.branches]
            last = len(feed.ids) - 1
            for i, (token, position) in enumerate(zip(feed.ids, feed.positions, strict=True)):
                if batch.n_tokens == self._batch_tokens:
                    self._decode(rows)
                self._put(token, position, sequences, wanted=feed.wants_logits and i == last)
        self._decode(rows)
        return logits_FV

    def _check_positions(self, feeds: Sequence[Feed]) -> None:
        following: dict[Branch, int] = {}
        for feed in feeds:
            writer = feed.branches[0]
            self._cache.limits.check(feed.ids, feed.positions)
            start = following.get(writer) or self._cache.next_position(writer)
            end = start + len(feed.ids)
            assert feed.positions == tuple(range(start, end)), (
                "llama.cpp takes no gaps between positions"
            )
            following |= dict.fromkeys(feed.branches, end)

    def _put(self, token: int, position: int, sequences: Sequence[int], *, wanted: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i] = len(sequences)
        for n, sequence in enumerate(sequences):
            batch.seq_id[i][n] = sequence
        batch.n_tokens = i + 1

    def _decode(self, rows: Iterator[FloatArray]) -> None:
        """Decode what the batch holds, empty it, and fill a row for each logits_V wanted of it."""
        batch = self._batch
        if not batch.n_tokens:
            return
        errors.clear()
        status = self.library.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}: {'; '.join(errors)}")
        for i in range(batch.n_tokens):
            if batch.logits[i]:
                pointer = self.library.llama_get_logits_ith(self.context, i)
                next(rows)[:] = np.ctypeslib.as_array(pointer, (self.vocabulary_size,))
        batch.n_tokens = 0

    def _mark(self, source: Branch, target: Branch, end: int = -1) -> None:
        """Let a branch see the cells of another, at positions below `end` unless that is -1."""
        given, taken = self._sequences[source], self._sequences[target]
        self.library.llama_memory_seq_cp(self._memory, given, taken, 0, end)

    def _forget(self, branch: Branch) -> None:
        sequence = self._sequences.pop(branch)
        self.library.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free_sequences.append(sequence)
