"""Forward passes of a Hugging Face model over the cells of several requests at once.

Shapes: Q tokens of the pass, F of them with logits, K cells, V vocabulary, R heads that share a kv
head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines.attention import PooledLayer, QuerySegment, learn_shapes, pooled_cache
from pasta_decoding.engines.compiled import MAX_TOKENS, Cells, CompiledPass
from pasta_decoding.engines.pool import BoolArray
from pasta_decoding.engines.request_table import Work
from pasta_decoding.engines.windows import attention_windows, visible

QUERY_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CELL_BUCKET = 256


@dataclass(slots=True)
class Tokens:
    """All tokens of a pass, one request's after the other's, and which of them want logits."""

    ids: list[int]
    positions: list[int]
    wanted: list[int]

    @classmethod
    def of(cls, works: Iterable[Work[int]]) -> Tokens:
        """Put the requests' tokens in a row."""
        tokens = cls([], [], [])
        for work in works:
            tokens.wanted += [len(tokens.ids) + index for index in work.step.wanted]
            tokens.ids += work.step.ids
            tokens.positions += work.step.positions
        return tokens


class Forward:
    """A model, its pool of cells, and passes over them. A work's store is its first cell.

    cells:    those of all requests; one more takes what fixed shapes write in vain.
    compiled: computes passes that it is wide enough for, in place of the model.
    """

    def __init__(
        self, model: PreTrainedModel, cells: int, compiled: CompiledPass | None = None
    ) -> None:
        config = model.config.get_text_config()
        self._model, self._cells, self._compiled = model, cells, compiled
        shapes = learn_shapes(model)
        self._cache, self._plan = pooled_cache(shapes, cells + 1)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._windows = tuple(attention_windows(config).values())
        self._rows = config.num_attention_heads // len(shapes[0].key_G1D)
        self._frames: dict[tuple[int, int], Frame] = {}
        self._graphs = Graphs()

    @torch.inference_mode()
    def free(self, works: Sequence[Work[int]]) -> Tensor:
        """Run one pass in the shapes that it has; return logits_FV in the order of the works."""
        tokens, device = Tokens.of(works), self._model.device
        self._plan.segments = tuple(self._segments(works))
        if self._compiled is not None and len(tokens.ids) <= MAX_TOKENS:
            cells = Cells(self._cache, self._plan)
            return self._compiled(tokens.ids, tokens.positions, tokens.wanted, cells)
        return self._call(
            torch.tensor([tokens.ids], device=device),
            torch.tensor([tokens.positions], device=device),
            torch.tensor(tokens.wanted, device=device, dtype=torch.long),
        )

    @torch.inference_mode()
    def fixed(self, works: Sequence[Work[int]]) -> Tensor | None:
        """Run one pass padded to a bucket's shapes; None if no bucket holds so many tokens.

        Queries are padded to one of QUERY_BUCKETS and cells to a multiple of CELL_BUCKET. On a GPU
        the pass is a CUDA graph, captured the first time its bucket is needed.
        """
        tokens = Tokens.of(works)
        end = max(work.store + work.step.mask_QK.shape[1] for work in works)
        if (frame := self._frame(len(tokens.ids), end)) is None:
            return None
        masks = {window: self._joint(works, window, *frame.shape) for window in self._windows}
        written = [
            work.store + work.step.first_cell + index
            for work in works
            for index in range(len(work.step.ids))
        ]
        frame.fill(tokens, written, self._cells, masks)
        logits_QV = self._run(frame)
        return logits_QV[torch.tensor(tokens.wanted, device=logits_QV.device, dtype=torch.long)]

    @torch.inference_mode()
    def forget(self, cells: slice) -> None:
        """Clear cells that nobody holds any more.

        Fixed shapes look at the cells of others, too, with weight 0; but 0 times infinity, which an
        overflow may have left there, is no number.
        """
        if self._frames:
            for layer in self._cache.layers:
                assert isinstance(layer, PooledLayer), "made by `pooled_cache`"
                layer.forget(cells)

    @torch.inference_mode()
    def alone(self, width: int, cells: int) -> tuple[int, int]:
        """Run the pass of the bucket for so many tokens and cells, on whatever its inputs hold.

        This is what a step of fixed shapes costs without anything around it. Returns the tokens and
        cells that it was padded to.
        """
        frame = self._frame(width, cells)
        assert frame is not None, "a width that some bucket holds"
        self._run(frame)
        return frame.shape

    def compiled_alone(self, width: int, cells: int) -> Callable[[], Tensor]:
        """Return the compiled pass of `width` tokens that see `cells` cells and each itself."""
        compiled = self._compiled
        assert compiled is not None, "only for an engine with a compiled pass"
        mask_QK = np.ones((width, cells + width), dtype=np.bool_)
        mask_QK[:, cells:] = np.eye(width, dtype=np.bool_)
        masks = dict.fromkeys(self._windows, self._additive(mask_QK))
        end = slice(cells, cells + width)
        segment = QuerySegment(slice(0, width), end, slice(0, end.stop), masks)
        ids, positions, wanted = [0] * width, [cells] * width, list(range(width))

        @torch.inference_mode()
        def call() -> Tensor:
            self._plan.segments = (segment,)
            return compiled(ids, positions, wanted, Cells(self._cache, self._plan))

        return call

    def _frame(self, tokens: int, end: int) -> Frame | None:
        """Return the frame of the bucket for so many tokens and cells; None if there is none."""
        queries = next((size for size in QUERY_BUCKETS if size >= tokens), None)
        if queries is None:
            return None
        shape = (queries, min(-(-end // CELL_BUCKET) * CELL_BUCKET, self._cells))
        if shape not in self._frames:
            self._frames[shape] = Frame(self._model, shape, self._windows, self._rows, self._graphs)
        return self._frames[shape]

    def _run(self, frame: Frame) -> Tensor:
        """Return logits_QV of a frame."""
        self._plan.segments = (frame.segment,)
        return frame.run(lambda: self._call(frame.ids_1Q, frame.positions_1Q, 0))

    def _call(self, ids_1Q: Tensor, positions_1Q: Tensor, wanted: Tensor | int) -> Tensor:
        """Call the model as the plan has it; the mask only keeps it from making one of its own."""
        output = self._model(
            input_ids=ids_1Q,
            position_ids=positions_1Q,
            attention_mask=self._no_mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=wanted,
            plan=self._plan,
        )
        logits_FV: Tensor = output.logits[0]
        return logits_FV

    def _segments(self, works: Iterable[Work[int]]) -> Iterable[QuerySegment]:
        first = 0
        for work in works:
            step, start = work.step, work.store
            end = start + step.mask_QK.shape[1]
            masks = {window: self._additive(visible(step, window)) for window in self._windows}
            queries = slice(first, first + len(step.ids))
            yield QuerySegment(
                queries, slice(start + step.first_cell, end), slice(start, end), masks
            )
            first = queries.stop

    def _additive(self, mask_QK: BoolArray) -> Tensor | None:
        """Return the mask as all layers add it; None where attention needs none."""
        queries, cells = mask_QK.shape
        if queries in (1, cells) and np.array_equal(
            mask_QK, np.tri(queries, cells, cells - queries)
        ):
            return None
        return additive(mask_QK, self._rows, self._model.dtype).to(self._model.device)

    def _joint(
        self, works: Iterable[Work[int]], window: int | None, queries: int, cells: int
    ) -> Tensor:
        """Return one mask for all requests, each its own block; padding sees all cells."""
        mask_QK = np.zeros((queries, cells), dtype=np.bool_)
        first = 0
        for work in works:
            own_QK = visible(work.step, window)
            rows, columns = own_QK.shape
            mask_QK[first : first + rows, work.store : work.store + columns] = own_QK
            first += rows
        mask_QK[first:] = True
        return additive(mask_QK, self._rows, self._model.dtype)


def additive(mask_QK: BoolArray, rows: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores, [1, 1, R x Q, K]."""
    hidden_QK = torch.from_numpy(~mask_QK)
    mask = torch.zeros(hidden_QK.shape, dtype=dtype).masked_fill_(hidden_QK, float("-inf"))
    return mask.repeat(rows, 1)[None, None]


@dataclass(slots=True)
class Graphs:
    """What the CUDA graphs of one model share.

    memory: theirs; each one's logits are copied before the next is replayed.
    work:   False once the model turned out to do what a graph cannot record.
    """

    memory: Any = None
    work: bool = True


class Frame:
    """The inputs of passes of one shape, at addresses that stay, and the graph that reads them.

    shape: queries and cells, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: tuple[int, int],
        windows: Iterable[int | None],
        rows: int,
        graphs: Graphs,
    ) -> None:
        self._graphs = graphs
        self.shape = queries, cells = shape
        make: Any = {"device": model.device}
        self.ids_1Q = torch.zeros(1, queries, dtype=torch.long, **make)
        self.positions_1Q = torch.zeros_like(self.ids_1Q)
        written_Q = torch.zeros(queries, dtype=torch.long, **make)
        size = (1, 1, rows * queries, cells)
        masks = {window: torch.zeros(size, dtype=model.dtype, **make) for window in windows}
        self.segment = QuerySegment(slice(None), written_Q, slice(0, cells), masks)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_QV: Tensor | None = None

    def fill(
        self,
        tokens: Tokens,
        written: list[int],
        spare_cell: int,
        masks: dict[int | None, Tensor],
    ) -> None:
        """Put in the tokens of a pass; the rest writes the spare cell and is never read."""
        padding = self.ids_1Q.shape[1] - len(tokens.ids)
        assert isinstance(self.segment.written, Tensor), "fixed shapes name each cell"
        self.ids_1Q.copy_(torch.tensor([tokens.ids + [0] * padding]))
        self.positions_1Q.copy_(torch.tensor([tokens.positions + [0] * padding]))
        self.segment.written.copy_(torch.tensor(written + [spare_cell] * padding))
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
