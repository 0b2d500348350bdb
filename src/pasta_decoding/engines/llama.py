"""llama.cpp, through llama-cpp-python's low-level API: one llama sequence id a branch.

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
from itertools import count
from pathlib import Path

import numpy as np

from pasta_decoding.engines import DEFAULT_CELLS
from pasta_decoding.engines.base import Branch, Feed, FloatArray
from pasta_decoding.engines.llama_seats import OpenRequest, Seat, check_feeds, seat_of
from pasta_decoding.engines.llamacpp import (
    MAX_SEQUENCES,
    CacheType,
    errors,
    free,
    library,
    load_model,
    make_context,
)
from pasta_decoding.engines.pool import Limits
from pasta_decoding.errors import PastaError


class LlamaEngine:
    """Implements `Engine` on a GGUF file.

    cells:      tokens that all open requests together may hold.
    threads:    processor threads; None leaves the choice to llama.cpp.
    cache_type: of keys and values. F32 is for comparisons with the torch engine.

    `library` and `context` are llama.cpp's own, for measurements beside the engine.
    """

    def __init__(
        self,
        path: Path,
        *,
        cells: int = DEFAULT_CELLS,
        threads: int | None = None,
        cache_type: CacheType = "F16",
    ) -> None:
        self.library = library()
        self.path = path
        self._model = load_model(path)
        try:
            self.context = make_context(self._model, cells, threads, cache_type)
        except PastaError:
            self.library.llama_model_free(self._model)
            raise
        self._batch_tokens = int(self.library.llama_n_batch(self.context))
        self._memory = self.library.llama_get_memory(self.context)
        self._batch = self.library.llama_batch_init(self._batch_tokens, 0, MAX_SEQUENCES)
        weakref.finalize(self, free, self.library, self._batch, self.context, self._model)
        vocabulary = self.library.llama_model_get_vocab(self._model)
        trained = int(self.library.llama_model_n_ctx_train(self._model))
        self._limits = Limits(int(self.library.llama_vocab_n_tokens(vocabulary)), trained)
        self.max_cells = int(self.library.llama_n_ctx(self.context))
        self._seats: dict[Branch, Seat] = {}
        self._free_sequences = list(range(MAX_SEQUENCES))
        self._names, self._views = count(), count()

    @property
    def name(self) -> str:
        """See `Engine`."""
        return f"llama {self._file_type()}"

    @property
    def vocabulary_size(self) -> int:
        """See `Engine`."""
        return self._limits.vocabulary_size

    @property
    def max_positions(self) -> int:
        """See `Engine`."""
        return min(self._limits.max_positions, self.max_cells)

    @property
    def free_positions(self) -> bool:
        """See `Engine`. llama.cpp refuses a sequence with gaps."""
        return False

    @property
    def max_branches(self) -> int:
        """Branches that may be open at a time."""
        return MAX_SEQUENCES

    @property
    def cells_in_use(self) -> int:
        """See `Engine`."""
        return sum(request.used for request in self._requests())

    def _file_type(self) -> str:
        """Return what most matrices are: the description reads like "llama 1B Q4_K - Medium"."""
        buffer = ctypes.create_string_buffer(128)
        self.library.llama_model_desc(self._model, buffer, 128)
        form = buffer.value.decode().split(maxsplit=2)[-1].removeprefix("all ")
        return form.replace(" - Medium", "_M")

    def metadata(self, key: str) -> str | None:
        """Return a text from the file's metadata; None if it holds no such key."""
        read = self.library.llama_model_meta_val_str
        length = read(self._model, key.encode(), ctypes.create_string_buffer(1), 1)
        if length < 0:
            return None
        buffer = ctypes.create_string_buffer(length + 1)
        read(self._model, key.encode(), buffer, length + 1)
        return buffer.value.decode("utf-8")

    @property
    def sequences_in_cache(self) -> int:
        """How many llama sequences hold cells: 0 with nothing open."""
        position = self.library.llama_memory_seq_pos_max
        return sum(position(self._memory, s) >= 0 for s in range(MAX_SEQUENCES))

    def open(self, *, reserved_tokens: int) -> Branch:
        """See `Engine`."""
        assert reserved_tokens > 0, "that is a number of tokens"
        taken = sum(request.reserved_tokens for request in self._requests())
        if taken + reserved_tokens > self.max_cells:
            raise PastaError(
                f"no room for a request of {reserved_tokens} tokens: {taken} of the context's "
                f"{self.max_cells} cells are taken",
                hint="allow fewer tokens for the answer, or give the engine a larger context",
            )
        return self._enter(
            Seat(OpenRequest(reserved_tokens), self._take_sequence(), next(self._views))
        )

    def fork(self, parent: Branch) -> Branch:
        """See `Engine`. Raises PastaError if llama.cpp has no sequence left."""
        seat = self._seat(parent)
        sequence = self._take_sequence()
        seat.request.forked_at = seat.request.line
        self._copy(seat.sequence, sequence)
        return self._enter(Seat(seat.request, sequence, seat.view, seat.next_position))

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """See `Engine`."""
        seat = self._seat(parent)
        joined = [self._seat(child) for child in children]
        assert parent not in children, "a branch cannot join itself"
        assert all(c.request is seat.request for c in joined), "a request joins its own branches"
        for child, other in zip(children, joined, strict=True):
            self._copy(other.sequence, seat.sequence)
            seat.next_position = max(seat.next_position, other.next_position)
            self.close(child)
        seat.view = next(self._views)

    def close(self, branch: Branch) -> None:
        """See `Engine`."""
        seat = self._seat(branch)
        self.library.llama_memory_seq_rm(self._memory, seat.sequence, -1, -1)
        self._free_sequences.append(seat.sequence)
        seat.request.branches -= 1
        del self._seats[branch]

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        """See `Engine`. No key is copied: both sequences mark the same cells."""
        given, taken = self._seat(source), self._seat(target)
        taken.request.copy(given.request, tokens)
        self._copy(given.sequence, taken.sequence, tokens)
        taken.view, taken.next_position = next(self._views), tokens

    def shrink(self, branch: Branch, tokens: int) -> None:
        """See `Engine`."""
        kept = self._seat(branch)
        kept.request.shrink(tokens)
        self.library.llama_memory_seq_rm(self._memory, kept.sequence, tokens, -1)
        kept.view, kept.next_position = next(self._views), tokens

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. More tokens than a batch takes are decoded in several."""
        check_feeds(feeds, self._seats, self._limits)
        wanted = sum(feed.wants_logits for feed in feeds)
        logits_FV: FloatArray = np.empty((wanted, self.vocabulary_size), dtype=np.float32)
        rows = iter(logits_FV)
        batch = self._batch
        batch.n_tokens = 0
        for feed in feeds:
            sequences = [self._seats[branch].sequence for branch in feed.branches]
            last = len(feed.ids) - 1
            for i, (token, position) in enumerate(zip(feed.ids, feed.positions, strict=True)):
                if batch.n_tokens == self._batch_tokens:
                    self._decode(rows)
                self._put(token, position, sequences, wanted=feed.wants_logits and i == last)
            self._enter_feed(feed)
        self._decode(rows)
        return logits_FV

    def _enter_feed(self, feed: Feed) -> None:
        view = next(self._views)
        for branch in feed.branches:
            seat = self._seats[branch]
            seat.view, seat.next_position = view, feed.positions[-1] + 1
        self._seats[feed.branches[0]].request.used += len(feed.ids)

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

    def _requests(self) -> set[OpenRequest]:
        return {seat.request for seat in self._seats.values()}

    def _seat(self, branch: Branch) -> Seat:
        return seat_of(branch, self._seats)

    def _enter(self, seat: Seat) -> Branch:
        branch = Branch(next(self._names))
        self._seats[branch] = seat
        seat.request.branches += 1
        return branch

    def _take_sequence(self) -> int:
        if not self._free_sequences:
            raise PastaError(
                f"llama.cpp decodes at most {MAX_SEQUENCES} branches at a time",
                hint="run fewer requests at a time, or allow fewer threads for each",
            )
        return self._free_sequences.pop()

    def _copy(self, source: int, target: int, end: int = -1) -> None:
        """Let a sequence have the cells of another, at positions below `end` unless that is -1."""
        self.library.llama_memory_seq_cp(self._memory, source, target, 0, end)
