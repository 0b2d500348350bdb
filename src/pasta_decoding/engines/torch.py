"""Any unpatched Hugging Face causal model with rotary positions: the reference.

All requests share one KV cache, taken once. A step is one forward pass over the tokens of all its
requests, or several one after the other: position ids and lists of visible slots keep them apart.
On a GPU passes have few sizes, which are replayed as CUDA graphs: their inputs stay where they are,
and only the number of rows is padded; what they see is data.

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
from pasta_decoding.engines.attention import SLOTS, SlotCache, SlotRows, has_kernel
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import CachedEngine, IntArray
from pasta_decoding.engines.support import refuse_unsupported

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
FEW = (1, 8, 64)
"""How many rows of a padded pass have logits: one of these, or all."""
MOST = SIZES[-1]
HEADER = 6 * MOST
"""A pass's inputs begin with `MOST` numbers each: ids, positions, slots written, where each row's
list starts, its length, and the rows that logits are wanted of. The lists follow."""
ROOM = 2**20

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
        self.model, self._device = model, model.device
        self.keeps_logits = on_gpu = model.device.type == "cuda"
        self.name = f"torch {str(model.dtype).removeprefix('torch.')}"
        self._padded = self._use_graphs = has_kernel(model.device)
        if self._padded:
            self.batch_tokens = 3 * MOST
        elif on_gpu:
            _log.warning("steps of many requests take several times as long: there is no Triton")
        self._cache = SlotCache(model, cache_tokens)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._take_inputs(ROOM)

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
        wanted_F, parts = np.array(batch.logits_tokens, dtype=np.int32), []
        for first in range(0, rows_5Q.shape[1], MOST):
            own_F = wanted_F[(first <= wanted_F) & (wanted_F < first + MOST)] - first
            parts.append(self._pass(rows_5Q[:, first : first + MOST], lists, own_F))
        logits_FV = torch.cat(parts)
        return logits_FV if batch.order is None else logits_FV[batch.order]

    def _pass(self, rows_5Q: IntArray, lists: IntArray, wanted_F: IntArray) -> Tensor:
        rows, kept = rows_5Q.shape[1], len(wanted_F)
        size = rows
        if self._padded:
            size = next(one for one in SIZES if one >= rows)
            kept = next(one for one in sorted((*FEW, size)) if one >= kept)
        header = np.zeros((6, MOST), dtype=np.int32)
        # What padding sees, one slot, and what follows from it are never read.
        header[2, rows:size], header[4, rows:size] = self._cache.spare, 1
        header[:5, :rows], header[5, : len(wanted_F)] = rows_5Q, wanted_F
        inputs = np.concatenate([header.ravel(), lists])
        if len(inputs) > len(self._inputs):
            self._take_inputs(2 * len(lists))
        self._inputs[: len(inputs)] = to_device(inputs, self._device)
        # A copy: the next replay writes to the same memory.
        logits_FV = self._run(size, kept)
        return logits_FV[: len(wanted_F)].to(torch.float32, copy=True)

    def _take_inputs(self, room: int) -> None:
        """Take memory for inputs; graphs that read the old one are no more."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._inputs = torch.zeros(HEADER + room, dtype=torch.int32, device=self._device)

    def _run(self, size: int, kept: int) -> Tensor:
        """Compute a pass: on a GPU by a graph, captured the first time its size is needed."""
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

    def _capture(self, size: int, kept: int) -> None:
        self._compute(size, kept)  # compiles the kernels; the replay writes the same again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            logits_FV = self._compute(size, kept)
        self._graphs[size, kept] = graph, logits_FV

    def _compute(self, size: int, kept: int) -> Tensor:
        header, cache = self._inputs[:HEADER].view(6, MOST)[:, :size], self._cache
        ids_Q, positions_Q, written_Q, starts_Q, lengths_Q, wanted_Q = header
        written_Q = written_Q.long()
        cache.positions_S.index_copy_(0, written_Q, positions_Q)
        cache.rows = SlotRows(
            written_Q, positions_Q, cache.positions_S, starts_Q, lengths_Q, self._inputs[HEADER:]
        )
        output = self.model(
            input_ids=ids_Q.long()[None],
            position_ids=positions_Q.long()[None],
            attention_mask=self._no_mask,  # only keeps the model from making one of its own
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=wanted_Q[:kept].long(),
            rows=cache.rows,
        )
        logits_FV: Tensor = output.logits[0]
        return logits_FV


def to_device(numbers: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy to the device without waiting for what it does."""
    held = torch.from_numpy(numbers)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held
