"""Forward passes of a Hugging Face model over the cells of several requests at once.

Shapes: Q tokens of the pass, F of them with logits, K cells, V vocabulary, R heads that share a kv
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines.attention import PooledLayer, QuerySegment, learn_shapes, pooled_cache
from pasta_decoding.engines.cell_attention import Seen
from pasta_decoding.engines.compiled import MAX_TOKENS, CompiledPass
from pasta_decoding.engines.frames import Frame, Graphs, Tokens
from pasta_decoding.engines.pool import BoolArray, Step
from pasta_decoding.engines.request_table import Work
from pasta_decoding.engines.windows import attention_windows, sees_all_before, visible

QUERY_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CELL_BUCKET = 256


class Forward:
    """A model, its pool of cells, and passes over them. A work's store is its first cell.

    cells:    those of all requests; one more takes what fixed shapes write in vain.
    compiled: computes passes that it is wide enough for, in place of the model.
    """

    def __init__(
        self, model: PreTrainedModel, cells: int, compiled: CompiledPass | None = None
    ) -> None:
        config = model.config.get_text_config()
        self._model, self._cells, self.compiled = model, cells, compiled
        shapes = learn_shapes(model)
        self._cache, self._plan = pooled_cache(shapes, cells + 1)
        self._layers = [one for one in self._cache.layers if isinstance(one, PooledLayer)]
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._windows = tuple(attention_windows(config).values())
        self._rows = config.num_attention_heads // len(shapes[0].key_G1D)
        self._frames: dict[tuple[int, int], Frame] = {}
        self._graphs = Graphs()

    @torch.inference_mode()
    def free(self, works: Sequence[Work[int]]) -> Tensor:
        """Run one pass in the shapes that it has; return logits_FV in the order of the works."""
        tokens, device = Tokens.of(works), self._model.device
        if self.compiled is not None and len(tokens.ids) <= MAX_TOKENS:
            return self.compiled(tokens, self._layers, Seen.of(works, self._windows))
        self._plan.segments = tuple(self._segments(works))
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
            for layer in self._layers:
                layer.forget(cells)

    @torch.inference_mode()
    def copy(self, source: slice, target: slice) -> None:
        """Copy keys and values to cells of another request."""
        for layer in self._layers:
            layer.copy(source, target)

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
        compiled = self.compiled
        assert compiled is not None, "only for an engine with a compiled pass"
        mask_QK = np.ones((width, cells + width), dtype=np.bool_)
        mask_QK[:, cells:] = np.eye(width, dtype=np.bool_)
        places = np.arange(cells + width)
        step = Step(cells, [0] * width, [cells] * width, mask_QK, places, list(range(width)))
        works = [Work(0, [], step, [])]
        tokens, seen = Tokens.of(works), Seen.of(works, self._windows)

        @torch.inference_mode()
        def call() -> Tensor:
            return compiled(tokens, self._layers, seen)

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
        if sees_all_before(mask_QK):
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
