"""Any unpatched Hugging Face causal model with rotary positions: the reference.

All requests share one pool of cells, taken once. A step is one forward pass over the tokens of all
requests in it, told apart by position ids and by the cells that each of them sees.

Shapes: F feeds that want logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines import DEFAULT_CELLS
from pasta_decoding.engines.attention import POOLED
from pasta_decoding.engines.base import Branch, Feed, FloatArray
from pasta_decoding.engines.cell_allocator import CellAllocator
from pasta_decoding.engines.compiled import CompiledPass
from pasta_decoding.engines.forward import Forward
from pasta_decoding.engines.pool import Limits
from pasta_decoding.engines.refusal import refuse_unsupported
from pasta_decoding.engines.request_table import RequestTable


class TorchEngine:
    """Implements `Engine` on a loaded model, with its dtype and on its device.

    The model is taken over: it is put into evaluation mode and given another attention function.
    A model that the engine cannot run exactly is refused here, by name.

    cells:        tokens that the cache holds, those of all requests together.
    fixed_shapes: pad every step to one of a few shapes, which a GPU replays as CUDA graphs; None
                  does so on a GPU only.
    keeps_logits: see `KeepsLogits`; None: on a GPU only.
    compiled:     the model's forward pass, compiled for this processor; it computes the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cells: int = DEFAULT_CELLS,
        fixed_shapes: bool | None = None,
        keeps_logits: bool | None = None,
        compiled: CompiledPass | None = None,
    ) -> None:
        refuse_unsupported(model)
        model.eval()
        model.set_attn_implementation(POOLED)
        config = model.config.get_text_config()
        self._model, self._forward = model, Forward(model, cells, compiled)
        on_gpu = model.device.type == "cuda"
        self._fixed = on_gpu if fixed_shapes is None else fixed_shapes
        self.keeps_logits = on_gpu if keeps_logits is None else keeps_logits
        self._allocator = CellAllocator(cells)
        self._table: RequestTable[int] = RequestTable(
            Limits(int(config.vocab_size), int(config.max_position_embeddings))
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model that was taken over."""
        return self._model

    @property
    def is_compiled(self) -> bool:
        """Does a compiled program compute the steps?"""
        return self._forward.compiled is not None

    def change_over(self, compiled: CompiledPass) -> None:
        """Let a compiled program compute from the next step on. Any thread may call."""
        self._forward.compiled = compiled

    @property
    def name(self) -> str:
        """See `Engine`."""
        kind = "compiled" if self.is_compiled else "torch"
        return f"{kind} {str(self._model.dtype).removeprefix('torch.')}"

    @property
    def vocabulary_size(self) -> int:
        """See `Engine`."""
        return self._table.limits.vocabulary_size

    @property
    def max_positions(self) -> int:
        """See `Engine`."""
        return self._table.limits.max_positions

    @property
    def free_positions(self) -> bool:
        """See `Engine`."""
        return True

    @property
    def cells_in_use(self) -> int:
        """See `Engine`."""
        return self._table.cells_in_use

    @property
    def max_cells(self) -> int | None:
        """See `Engine`."""
        return self._allocator.cells

    @property
    def max_branches(self) -> int | None:
        """See `Engine`."""
        return self._table.limits.max_branches

    def open(self, *, reserved_tokens: int) -> Branch:
        """See `Engine`."""
        return self._table.open(self._allocator.take(reserved_tokens), reserved_tokens)

    def fork(self, parent: Branch) -> Branch:
        """See `Engine`."""
        return self._table.fork(parent)

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """See `Engine`."""
        self._table.join(parent, children)

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        """See `Engine`."""
        given, taken = self._table.copy(source, target, tokens)
        self._forward.copy(slice(given, given + tokens), slice(taken, taken + tokens))

    def shrink(self, branch: Branch, tokens: int) -> None:
        """See `Engine`."""
        first_cell = self._table.shrink(branch, tokens)
        self._forward.forget(self._allocator.shrink(first_cell, tokens))

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. One forward pass."""
        logits_FV: FloatArray = self.step_kept(feeds).cpu().numpy()
        return logits_FV

    def step_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """See `KeepsLogits`."""
        works = self._table.plan(feeds)
        rows = [row for work in works for row in work.rows]
        device = self._model.device
        if not works:
            return torch.empty(0, self.vocabulary_size, device=device)
        found = self._forward.fixed(works) if self._fixed else None
        logits_FV = (self._forward.free(works) if found is None else found).float()
        if rows == sorted(rows):  # as they came, unless requests took turns: nothing to copy
            return logits_FV
        return logits_FV[torch.tensor(rows, device=device, dtype=torch.long).argsort()]

    def fixed_pass(self, width: int, cells: int) -> tuple[int, int]:
        """Run the forward pass of a step of fixed shapes, without anything around it: for timing.

        It computes on whatever the last step of these shapes left; nothing may be open. Returns the
        tokens and cells that it was padded to.
        """
        assert self.cells_in_use == 0, "it writes cells"
        return self._forward.alone(width, cells)

    def compiled_call(self, width: int, cells: int) -> Callable[[], object]:
        """Return the compiled pass of a step, without anything around it: for timing.

        It writes cells; nothing may be open when it is called.
        """
        assert self.cells_in_use == 0, "it writes cells"
        return self._forward.compiled_alone(width, min(cells, self._allocator.cells - width))

    def close(self, branch: Branch) -> None:
        """See `Engine`."""
        first_cell = self._table.close(branch)
        if first_cell is not None:
            self._forward.forget(self._allocator.give_back(first_cell))
