"""Any unpatched Hugging Face causal model with rotary positions: the reference.

All requests share one KV cache, allocated once. A step is one forward pass over the tokens of all
its requests, or several one after the other: position ids and lists of visible slots keep requests
apart. On a GPU the number of rows is padded to one of few sizes, and a pass of each size is a CUDA
graph: its inputs, the lists of slots among them, are copied to the memory that the graph reads.

Shapes: Q rows (tokens) of a pass, F of them with logits, V vocabulary.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.attention import SLOTS, SlotCache, has_kernel
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import CachedEngine, IntArray
from pasta_decoding.engines.slot_rows import SlotRows
from pasta_decoding.engines.support import refuse_unsupported

PADDED_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""How many rows a padded pass may have."""
PADDED_LOGITS_ROWS = (1, 8, 64)
"""How many rows of a padded pass may have logits, unless all have."""
MAX_ROWS = PADDED_ROWS[-1]
HEADER_NUMBERS = 6 * MAX_ROWS
"""A pass's inputs begin with six lines of `MAX_ROWS` numbers: ids, positions, slots written, where
each row's list starts, its length, and the rows whose logits are wanted. The lists follow."""
LISTS_NUMBERS = 2**20
"""The numbers of all lists of a pass that there is memory for at first."""

_log = logging.getLogger(__name__)


class TorchEngine(CachedEngine):
    """Implements `Engine` on a loaded model, with its dtype and on its device.

    The model is taken over: it is put into evaluation mode and given another attention function.
    A model that the engine cannot run exactly is refused here, by name.

    cache_tokens: tokens that the cache holds, those of all requests together.
    """

    def __init__(self, model: PreTrainedModel, *, cache_tokens: int = DEFAULT_CACHE_TOKENS) -> None:
        refuse_unsupported(model)
        model.eval()
        model.set_attn_implementation(SLOTS)
        config = model.config.get_text_config()
        super().__init__(
            Limits(int(config.vocab_size), int(config.max_position_embeddings), cache_tokens)
        )
        self.model = model
        self._device = model.device
        on_gpu = model.device.type == "cuda"
        self.keeps_logits = on_gpu
        self.name = f"torch {str(model.dtype).removeprefix('torch.')}"
        self._padded = has_kernel(model.device)
        self._use_graphs = self._padded
        if self._padded:
            self.batch_tokens = 3 * MAX_ROWS
        elif on_gpu:
            _log.warning("steps of many requests take several times as long: there is no Triton")
        self._cache = SlotCache(model, cache_tokens)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        # By the numbers of rows and of rows with logits: a graph, and the logits that it writes.
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._allocate_inputs(LISTS_NUMBERS)

    @torch.inference_mode()
    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        self._cache.copy(*self.mark_copied(source, target, tokens))

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        logits_FV: FloatArray = self.step_kept(feeds).cpu().numpy()
        return logits_FV

    @torch.inference_mode()
    def step_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """A row never sees what a later one writes, so a step may be cut anywhere."""
        batch = self.plan(feeds)
        if not batch.items:
            return torch.empty(0, self.vocabulary_size, device=self._device)
        rows_5Q, lists = batch.rows()
        logits_rows_F = np.array(batch.logits_tokens, dtype=np.int32)
        passes = []
        for first in range(0, rows_5Q.shape[1], MAX_ROWS):
            end = first + MAX_ROWS
            in_pass_F = (first <= logits_rows_F) & (logits_rows_F < end)
            logits_FV = self._pass(rows_5Q[:, first:end], lists, logits_rows_F[in_pass_F] - first)
            passes.append(logits_FV)
        logits_FV = torch.cat(passes)
        return logits_FV if batch.order is None else logits_FV[batch.order]

    def _pass(self, rows_5Q: IntArray, lists: IntArray, logits_rows_F: IntArray) -> Tensor:
        """Compute up to `MAX_ROWS` rows; return logits_FV, a row for each of `logits_rows_F`."""
        rows = rows_5Q.shape[1]
        logits_rows = len(logits_rows_F)
        padded_rows = rows
        padded_logits_rows = logits_rows
        if self._padded:
            padded_rows = next(size for size in PADDED_ROWS if size >= rows)
            logits_sizes = sorted((*PADDED_LOGITS_ROWS, padded_rows))
            padded_logits_rows = next(size for size in logits_sizes if size >= logits_rows)
        header = np.zeros((6, MAX_ROWS), dtype=np.int32)
        header[:5, :rows] = rows_5Q
        header[5, :logits_rows] = logits_rows_F
        # A padding row sees one slot. That slot, and what follows from it, are never read.
        header[2, rows:padded_rows] = self._cache.spare
        header[4, rows:padded_rows] = 1
        inputs = np.concatenate([header.ravel(), lists])
        if len(inputs) > len(self._inputs):
            self._allocate_inputs(2 * len(lists))
        self._inputs[: len(inputs)] = to_device(inputs, self._device)
        logits_FV = self._run(padded_rows, padded_logits_rows)
        # A copy: the next replay writes to the same memory.
        return logits_FV[:logits_rows].to(torch.float32, copy=True)

    def _allocate_inputs(self, lists_numbers: int) -> None:
        """Take memory for inputs; drop the graphs that read the memory of before."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        size = HEADER_NUMBERS + lists_numbers
        self._inputs = torch.zeros(size, dtype=torch.int32, device=self._device)

    def _run(self, rows: int, logits_rows: int) -> Tensor:
        """Compute the pass in `_inputs`: on a GPU by a graph, captured once for each size."""
        if self._use_graphs and (rows, logits_rows) not in self._graphs:
            try:
                self._capture(rows, logits_rows)
            except RuntimeError as error:
                self._use_graphs = False
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
        if not self._use_graphs:
            return self._compute(rows, logits_rows)
        graph, logits_FV = self._graphs[rows, logits_rows]
        graph.replay()
        return logits_FV

    def _capture(self, rows: int, logits_rows: int) -> None:
        self._compute(rows, logits_rows)  # compiles the kernels; the replay writes the same again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            logits_FV = self._compute(rows, logits_rows)
        self._graphs[rows, logits_rows] = graph, logits_FV

    def _compute(self, rows: int, logits_rows: int) -> Tensor:
        cache = self._cache
        header = self._inputs[:HEADER_NUMBERS].view(6, MAX_ROWS)[:, :rows]
        ids_Q, positions_Q, written_Q, starts_Q, lengths_Q, logits_rows_Q = header
        written_Q = written_Q.long()
        cache.positions_S.index_copy_(0, written_Q, positions_Q)
        cache.rows = SlotRows(
            written_Q,
            positions_Q,
            cache.positions_S,
            starts_Q,
            lengths_Q,
            self._inputs[HEADER_NUMBERS:],
        )
        output = self.model(
            input_ids=ids_Q.long()[None],
            position_ids=positions_Q.long()[None],
            attention_mask=self._no_mask,  # only keeps the model from making one of its own
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_rows_Q[:logits_rows].long(),
            rows=cache.rows,
        )
        logits_FV: Tensor = output.logits[0]
        return logits_FV


def to_device(numbers: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy on the device; on a GPU it is made without waiting for running kernels."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
