"""Any unpatched Hugging Face causal model with rotary positions and full attention: the reference.

Each request has a pool of keys of its own. A step makes one forward pass for each request in it:
all of the request's feeds are one row of queries, told apart by mask and position ids.

Shapes: F feeds that want logits, V vocabulary, Q tokens of a step, K cells in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pasta_decoding.engines.attention import GROUPED, Span, learn_shapes, pooled_cache
from pasta_decoding.engines.base import Branch, Feed, FloatArray
from pasta_decoding.engines.ledger import Ledger
from pasta_decoding.engines.pool import BoolArray, Limits
from pasta_decoding.engines.refusal import refuse_unsupported


class TorchEngine:
    """Implements `Engine` on a loaded model, with its dtype and on its device.

    The model is taken over: it is put into evaluation mode and given another attention function.
    A model that the engine cannot run exactly is refused here, by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_unsupported(model)
        model.eval()
        model.set_attn_implementation(GROUPED)
        config = model.config.get_text_config()
        self._model, self._shapes = model, learn_shapes(model)
        self._ledger: Ledger[tuple[Cache, Span]] = Ledger(
            Limits(int(config.vocab_size), int(config.max_position_embeddings))
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model that was taken over."""
        return self._model

    @property
    def name(self) -> str:
        """See `Engine`."""
        return f"torch {str(self._model.dtype).removeprefix('torch.')}"

    @property
    def vocabulary_size(self) -> int:
        """See `Engine`."""
        return self._ledger.limits.vocabulary_size

    @property
    def max_positions(self) -> int:
        """See `Engine`."""
        return self._ledger.limits.max_positions

    @property
    def free_positions(self) -> bool:
        """See `Engine`."""
        return True

    @property
    def cells_in_use(self) -> int:
        """See `Engine`."""
        return self._ledger.cells_in_use

    @property
    def max_cells(self) -> int | None:
        """See `Engine`."""
        return self._ledger.limits.max_cells

    @property
    def max_branches(self) -> int | None:
        """See `Engine`."""
        return self._ledger.limits.max_branches

    def open(self, *, room: int) -> Branch:
        """See `Engine`."""
        return self._ledger.open(pooled_cache(self._shapes, room), room)

    def fork(self, parent: Branch) -> Branch:
        """See `Engine`."""
        return self._ledger.fork(parent)

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """See `Engine`."""
        self._ledger.join(parent, children)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. One forward pass for each request that is fed."""
        wanted = sum(feed.wants_logits for feed in feeds)
        logits_FV = np.empty((wanted, self.vocabulary_size), dtype=np.float32)
        for work in self._ledger.plan(feeds):
            (cache, span), step = work.store, work.step
            span.first, span.end = step.first_cell, step.first_cell + len(step.ids)
            logits_FV[work.rows] = self._forward(
                cache, step.ids, step.positions, step.mask_QK, step.wanted
            )
        return logits_FV

    def close(self, branch: Branch) -> None:
        """See `Engine`."""
        self._ledger.close(branch)

    @torch.inference_mode()
    def _forward(
        self,
        cache: Cache,
        ids: Sequence[int],
        positions: Sequence[int],
        mask_QK: BoolArray,
        wanted: list[int],
    ) -> FloatArray:
        """Run the model over the cells that the cache's span names; logits_FV of the wanted."""
        device = self._model.device
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=self._additive(mask_QK),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, device=device, dtype=torch.long),
        )
        logits_FV: FloatArray = output.logits[0].float().cpu().numpy()
        return logits_FV

    def _additive(self, mask_QK: BoolArray) -> Tensor | None:
        """Return the mask as attention adds it, made once for all layers.

        None where attention needs no mask: one query that sees all, or a causal beginning.
        """
        queries, keys = mask_QK.shape
        if queries in (1, keys) and np.array_equal(mask_QK, np.tri(queries, keys, keys - queries)):
            return None
        hidden_QK = torch.from_numpy(~mask_QK).to(self._model.device)
        mask = torch.zeros(hidden_QK.shape, device=hidden_QK.device, dtype=self._model.dtype)
        return mask.masked_fill_(hidden_QK, float("-inf"))[None, None]
