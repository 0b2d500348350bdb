"""Forward passes of fixed shapes: their inputs stay where they are, so a GPU can replay them.

Shapes: Q tokens of the pass, K slots, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines.attention import QuerySegment
from pasta_decoding.engines.kv_cache import Batch


@dataclass(slots=True)
class Graphs:
    """What the CUDA graphs of one model share.

    memory: theirs; each one's logits are copied before the next is replayed.
    work:   False once the model turned out to do what a graph cannot record.
    """

    memory: Any = None
    work: bool = True


class PaddedBatch:
    """The inputs of passes of one shape, at addresses that stay, and the graph that reads them.

    shape: queries and slots, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: tuple[int, int],
        windows: Iterable[int | None],
        shared_heads: int,
        graphs: Graphs,
    ) -> None:
        self._graphs = graphs
        self.shape = queries, slots = shape
        make: Any = {"device": model.device}
        self.ids_1Q = torch.zeros(1, queries, dtype=torch.long, **make)
        self.positions_1Q = torch.zeros_like(self.ids_1Q)
        written_Q = torch.zeros(queries, dtype=torch.long, **make)
        size = (1, 1, shared_heads * queries, slots)
        masks = {window: torch.zeros(size, dtype=model.dtype, **make) for window in windows}
        self.segment = QuerySegment(slice(None), written_Q, slice(0, slots), masks)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_QV: Tensor | None = None

    def fill(self, batch: Batch, spare_slot: int, masks: dict[int | None, Tensor]) -> None:
        """Put in the tokens of a pass; padding writes the spare slot and is never read."""
        padding = self.ids_1Q.shape[1] - len(batch.ids)
        written = [slot for item in batch.items for slot in item.written]
        assert isinstance(self.segment.written, Tensor), "fixed shapes name each slot"
        self.ids_1Q.copy_(torch.tensor([batch.ids + [0] * padding]))
        self.positions_1Q.copy_(torch.tensor([batch.positions + [0] * padding]))
        self.segment.written.copy_(torch.tensor(written + [spare_slot] * padding))
        for window, mask in masks.items():
            buffer = self.segment.masks[window]
            assert buffer is not None, "fixed shapes always have masks"
            buffer.copy_(mask)

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Return the logits_QV of the inputs: on a GPU replayed, elsewhere called."""
        if self._graph is None and self.ids_1Q.is_cuda and self._graphs.work:
            try:
                self._capture(call)
            except RuntimeError as error:
                self._graphs.work = False
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
        if self._graph is None:
            return call()
        assert self._logits_QV is not None, "captured with the graph"
        self._graph.replay()
        return self._logits_QV

    def _capture(self, call: Callable[[], Tensor]) -> None:
        """Record the pass. The calls that warm it up write what the replay writes again."""
        if self._graphs.memory is None:
            self._graphs.memory = torch.cuda.graph_pool_handle()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            call()
            call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs.memory):
            self._logits_QV = call()
        self._graph = graph
