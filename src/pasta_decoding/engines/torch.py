"""Any unpatched Hugging Face causal model with rotary positions: the reference.

All requests share one KV cache, taken once. A step is one forward pass over the tokens of all
its requests; position ids and visible slots keep them apart.

Shapes: Q tokens of the pass, F of them with logits, K slots, V vocabulary, R heads that share a kv
head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.attention import (
    SLOTS,
    QuerySegment,
    SlotLayer,
    learn_shapes,
    slot_cache,
)
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.cached import CachedEngine
from pasta_decoding.engines.cuda_graphs import Graphs, PaddedBatch
from pasta_decoding.engines.kv_cache import Batch, BoolArray, is_causal
from pasta_decoding.engines.support import attention_windows, refuse_unsupported

QUERY_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLOT_BUCKET = 256


class TorchEngine(CachedEngine):
    """Implements `Engine` on a loaded model, with its dtype and on its device.

    The model is taken over: it is put into evaluation mode and given another attention function.
    A model that the engine cannot run exactly is refused here, by name.

    cache_tokens: tokens that the cache holds, those of all requests together.
    fixed_shapes: pad every step to one of a few shapes, which a GPU replays as CUDA graphs; None
                  does so on a GPU only.
    keeps_logits: see `KeepsLogits`; None: on a GPU only.
    """

    max_slots: int

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        fixed_shapes: bool | None = None,
        keeps_logits: bool | None = None,
    ) -> None:
        refuse_unsupported(model)
        model.eval()
        model.set_attn_implementation(SLOTS)
        config = model.config.get_text_config()
        super().__init__(
            Limits(int(config.vocab_size), int(config.max_position_embeddings), cache_tokens)
        )
        on_gpu = model.device.type == "cuda"
        self.model = model
        self.name = f"torch {str(model.dtype).removeprefix('torch.')}"
        self.keeps_logits = on_gpu if keeps_logits is None else keeps_logits
        shapes = learn_shapes(model)
        # One more slot takes what padding writes.
        self._keys, self._plan = slot_cache(shapes, cache_tokens + 1)
        self._layers = [one for one in self._keys.layers if isinstance(one, SlotLayer)]
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._windows = tuple(attention_windows(config).values())
        self._shared_heads = config.num_attention_heads // len(shapes[0].key_G1D)
        self._fixed = on_gpu if fixed_shapes is None else fixed_shapes
        self._padded: dict[tuple[int, int], PaddedBatch] = {}
        self._graphs = Graphs()

    @torch.inference_mode()
    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        given, taken = self._cache.copy(source, target, tokens)
        for layer in self._layers:
            layer.copy(given, taken)

    def shrink(self, branch: Branch, tokens: int) -> None:
        self._forget(self._cache.shrink(branch, tokens))

    def close(self, branch: Branch) -> None:
        if freed := self._cache.close(branch):
            self._forget(freed)

    @torch.inference_mode()
    def _forget(self, slots: slice) -> None:
        """Clear slots that nobody holds any more.

        Fixed shapes also read the slots of others, with weight 0. An overflow may have left
        infinity there, and 0 times infinity is NaN.
        """
        if self._padded:
            for layer in self._layers:
                layer.forget(slots)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. One forward pass."""
        logits_FV: FloatArray = self.step_kept(feeds).cpu().numpy()
        return logits_FV

    @torch.inference_mode()
    def step_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """See `KeepsLogits`."""
        batch, device = self._cache.plan(feeds), self.model.device
        if not batch.items:
            return torch.empty(0, self.vocabulary_size, device=device)
        padded = self._padded_to(batch) if self._fixed else None
        logits_FV = (
            self._forward(batch) if padded is None else self._replay(batch, padded)
        ).float()
        order = batch.order
        return logits_FV if order is None else logits_FV[torch.tensor(order, device=device)]

    def _forward(self, batch: Batch) -> Tensor:
        """Run one pass in the shapes that it has; return logits_FV in the order of the batch."""
        self._plan.segments = tuple(self._segments(batch))
        device = self.model.device
        return self._call(
            torch.tensor([batch.ids], device=device),
            torch.tensor([batch.positions], device=device),
            torch.tensor(batch.wanted, device=device, dtype=torch.long),
        )

    def _replay(self, batch: Batch, padded: PaddedBatch) -> Tensor:
        """Run one pass padded to a bucket's shapes; return logits_FV in the order of the batch.

        On a GPU it is a CUDA graph, captured the first time its bucket is needed.
        """
        masks = {window: self._joint(batch, window, *padded.shape) for window in self._windows}
        padded.fill(batch, self.max_slots, masks)
        logits_QV = self._run(padded)
        return logits_QV[torch.tensor(batch.wanted, device=logits_QV.device, dtype=torch.long)]

    def _padded_to(self, batch: Batch) -> PaddedBatch | None:
        return self._bucket(len(batch.ids), max(item.end for item in batch.items))

    def _bucket(self, tokens: int, end: int) -> PaddedBatch | None:
        """Return the inputs of the bucket for these tokens and slots; None if no bucket is so wide.

        Queries are padded to one of QUERY_BUCKETS and slots to a multiple of SLOT_BUCKET.
        """
        queries = next((size for size in QUERY_BUCKETS if size >= tokens), None)
        if queries is None:
            return None
        shape = (queries, min(-(-end // SLOT_BUCKET) * SLOT_BUCKET, self.max_slots))
        if shape not in self._padded:
            self._padded[shape] = PaddedBatch(
                self.model, shape, self._windows, self._shared_heads, self._graphs
            )
        return self._padded[shape]

    def _run(self, padded: PaddedBatch) -> Tensor:
        self._plan.segments = (padded.segment,)
        return padded.run(lambda: self._call(padded.ids_1Q, padded.positions_1Q, 0))

    def _call(self, ids_1Q: Tensor, positions_1Q: Tensor, wanted: Tensor | int) -> Tensor:
        """Call the model as the plan has it; the mask only keeps it from making one of its own."""
        output = self.model(
            input_ids=ids_1Q,
            position_ids=positions_1Q,
            attention_mask=self._no_mask,
            past_key_values=self._keys,
            use_cache=True,
            logits_to_keep=wanted,
            plan=self._plan,
        )
        logits_FV: Tensor = output.logits[0]
        return logits_FV

    def _segments(self, batch: Batch) -> Iterator[QuerySegment]:
        first = 0
        for item in batch.items:
            masks = {window: self._additive(item.visible(window)) for window in self._windows}
            queries = slice(first, first + len(item.ids))
            written = slice(item.written.start, item.end)
            yield QuerySegment(queries, written, slice(item.start, item.end), masks)
            first = queries.stop

    def _additive(self, mask_QK: BoolArray) -> Tensor | None:
        """Return the mask as all layers add it; None where attention needs none."""
        if is_causal(mask_QK):
            return None
        return additive(mask_QK, self._shared_heads, self.model.dtype).to(self.model.device)

    def _joint(self, batch: Batch, window: int | None, queries: int, slots: int) -> Tensor:
        """Return one mask for all requests, each its own block; padding sees all slots."""
        mask_QK = np.zeros((queries, slots), dtype=np.bool_)
        first = 0
        for item in batch.items:
            last = first + len(item.ids)
            mask_QK[first:last, item.start : item.end] = item.visible(window)
            first = last
        mask_QK[first:] = True
        return additive(mask_QK, self._shared_heads, self.model.dtype)


def additive(mask_QK: BoolArray, shared_heads: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores, [1, 1, R x Q, K]."""
    hidden_QK = torch.from_numpy(~mask_QK)
    mask = torch.zeros(hidden_QK.shape, dtype=dtype).masked_fill_(hidden_QK, float("-inf"))
    return mask.repeat(shared_heads, 1)[None, None]
