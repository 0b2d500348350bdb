"""Forward passes over rows of tokens, of few sizes, which a GPU replays as CUDA graphs.

Their inputs stay where they are. Only the number of rows is padded; what they see is data.

Shapes: Q rows of the pass, F of them with logits, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.engines.kv_cache import Batch, IntArray
from pasta_decoding.engines.paged_attention import SlotRows

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
FEW = (1, 8, 64)
"""How many rows of a pass have logits: so many, or all."""
MOST = SIZES[-1]
HEADER = 6 * MOST
"""The inputs begin with `MOST` numbers each: ids, positions, slots written, where each row's list
starts, its length, and the rows that logits are wanted of. The lists follow."""
ROOM = 2**20

Call = Callable[[Tensor, Tensor, Tensor, SlotRows], Tensor]
"""From ids_1Q, positions_1Q, the rows that logits are wanted of, and what rows see, to logits."""


class PagedPasses:
    """Runs steps as passes of at most `MOST` rows, one after the other.

    A row never sees what a later one writes, so a step may be cut anywhere.

    slots: of the cache; the last one takes what padding writes.
    """

    def __init__(self, call: Call, device: torch.device, slots: int) -> None:
        self._call, self._device, self._spare = call, device, slots - 1
        self._positions_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._use_graphs = self._on_gpu = device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._copied: torch.cuda.Event | None = None
        if self._on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._take(ROOM)

    def copy(self, source: slice, target: slice) -> None:
        """Copy what is known of slots to others."""
        self._positions_S[target] = self._positions_S[source]

    def run(self, batch: Batch) -> Tensor:
        """Return float32 logits_FV in the order of the batch."""
        rows, lists = batch.rows()
        if HEADER + len(lists) > len(self._host):
            self._take(2 * len(lists))
        wanted, parts = np.array(batch.wanted, dtype=np.int32), []
        for first in range(0, rows.shape[1], MOST):
            own = wanted[(first <= wanted) & (wanted < first + MOST)] - first
            parts.append(self._pass(rows[:, first : first + MOST], lists, own))
        return torch.cat(parts)

    def _take(self, room: int) -> None:
        """Take memory for the inputs; graphs that read the old one are no more."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._host = torch.zeros(HEADER + room, dtype=torch.int32, pin_memory=self._on_gpu)
        self._inputs = torch.zeros_like(self._host, device=self._device)

    def _pass(self, rows_5Q: IntArray, lists: IntArray, wanted: IntArray) -> Tensor:
        size = next(one for one in SIZES if one >= rows_5Q.shape[1])
        kept = next(one for one in sorted((*FEW, size)) if one >= len(wanted))
        self._fill(rows_5Q, lists, wanted, size)
        logits_FV = self._replay(size, kept)
        # A copy: the next replay writes to the same memory.
        return logits_FV[: len(wanted)].to(torch.float32, copy=True)

    def _fill(self, rows_5Q: IntArray, lists: IntArray, wanted: IntArray, size: int) -> None:
        """Give the device a pass's inputs. Padding sees nothing and is never read."""
        if self._copied is not None:
            self._copied.synchronize()  # what was sent before has left this memory
        inputs, end = self._host.numpy(), HEADER + len(lists)
        header = inputs[:HEADER].reshape(6, MOST)
        header[:, :size] = 0
        header[2, :size] = self._spare
        header[:5, : rows_5Q.shape[1]] = rows_5Q
        header[5, : len(wanted)] = wanted
        inputs[HEADER:end] = lists
        self._inputs[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _replay(self, size: int, kept: int) -> Tensor:
        """Compute the pass: on a GPU by a graph, captured the first time its size is needed."""
        if self._use_graphs and (size, kept) not in self._graphs:
            try:
                self._capture(size, kept)
            except RuntimeError as error:
                self._use_graphs = False
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
        if not self._use_graphs:
            return self._compute(size, kept)
        graph, logits_FV = self._graphs[size, kept]
        graph.replay()
        return logits_FV

    def _compute(self, size: int, kept: int) -> Tensor:
        header = self._inputs[:HEADER].view(6, MOST)[:, :size]
        ids_Q, positions_Q, written_Q, starts_Q, lengths_Q, wanted_Q = header
        written_Q = written_Q.long()
        self._positions_S.index_copy_(0, written_Q, positions_Q)
        rows = SlotRows(
            written_Q, positions_Q, self._positions_S, starts_Q, lengths_Q, self._inputs[HEADER:]
        )
        return self._call(
            ids_Q.long()[None], positions_Q.long()[None], wanted_Q[:kept].long(), rows
        )

    def _capture(self, size: int, kept: int) -> None:
        """Record the pass. The calls that warm it up write what the replay writes again."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._compute(size, kept)
            self._compute(size, kept)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits_FV = self._compute(size, kept)
        self._graphs[size, kept] = graph, logits_FV
