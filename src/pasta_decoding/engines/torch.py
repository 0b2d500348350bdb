"""Any unpatched Hugging Face causal model with rotary positions: the reference.

All requests share one KV cache, taken once. A step is one forward pass over the tokens of all
its requests; position ids and visible slots keep them apart.

Shapes: Q tokens of the pass, F of them with logits, K slots, V vocabulary, R heads that share a kv
head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.attention import SLOTS, QuerySegment, SlotLayer, slot_cache
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import Batch, BoolArray, CachedEngine, is_causal
from pasta_decoding.engines.support import attention_windows, refuse_unsupported

if TYPE_CHECKING:
    from pasta_decoding.engines.cuda_graphs import PagedPasses
    from pasta_decoding.engines.paged_attention import SlotRows

PAGED_BATCH_TOKENS = 1536
_log = logging.getLogger(__name__)


class TorchEngine(CachedEngine):
    """Implements `Engine` on a loaded model, with its dtype and on its device.

    The model is taken over: it is put into evaluation mode and given another attention function.
    A model that the engine cannot run exactly is refused here, by name.

    cache_tokens: tokens that the cache holds, those of all requests together.
    paged: whether each row lists the slots that it sees, so that steps have few sizes, which a GPU
           replays as CUDA graphs; else each request is computed by itself, behind a mask. None: on
           a GPU with Triton only.
    keeps_logits: see `KeepsLogits`; None: on a GPU only.
    """

    _passes: PagedPasses | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        paged: bool | None = None,
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
        # One more slot takes what padding writes.
        self._keys, self._plan = slot_cache(model, cache_tokens + 1)
        self._layers = [one for one in self._keys.layers if isinstance(one, SlotLayer)]
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._windows = tuple(attention_windows(config).values())
        self._shared_heads = config.num_attention_heads // self._layers[0].held[0].shape[1]
        if paged is None and on_gpu and find_spec("triton") is None:
            _log.warning("steps of many requests take several times as long: there is no Triton")
        elif paged or (paged is None and on_gpu):
            from pasta_decoding.engines.cuda_graphs import PagedPasses

            self.batch_tokens = PAGED_BATCH_TOKENS
            self._passes = PagedPasses(self._call_paged, model.device, cache_tokens + 1)

    @torch.inference_mode()
    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        given, taken = self.copied(source, target, tokens)
        for layer in self._layers:
            layer.copy(given, taken)
        if self._passes is not None:
            self._passes.copy(given, taken)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """See `Engine`. One forward pass."""
        logits_FV: FloatArray = self.step_kept(feeds).cpu().numpy()
        return logits_FV

    @torch.inference_mode()
    def step_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """See `KeepsLogits`."""
        batch, device = self.plan(feeds), self.model.device
        if not batch.items:
            return torch.empty(0, self.vocabulary_size, device=device)
        passes = self._passes
        if passes is None:
            self._plan.segments = tuple(self._segments(batch))
            ids_1Q, positions_1Q = torch.tensor([[batch.ids], [batch.positions]], device=device)
            wanted_F = torch.tensor(batch.wanted, device=device, dtype=torch.long)
            logits_FV = self._call(ids_1Q, positions_1Q, wanted_F).float()
        else:
            logits_FV = passes.run(batch)
        order = batch.order
        return logits_FV if order is None else logits_FV[torch.tensor(order, device=device)]

    def _call_paged(
        self, ids_1Q: Tensor, positions_1Q: Tensor, wanted_F: Tensor, rows: SlotRows
    ) -> Tensor:
        self._plan.rows = rows
        return self._call(ids_1Q, positions_1Q, wanted_F)

    def _call(self, ids_1Q: Tensor, positions_1Q: Tensor, wanted_F: Tensor) -> Tensor:
        """Call the model as the plan has it; the mask only keeps it from making one of its own."""
        output = self.model(
            input_ids=ids_1Q,
            position_ids=positions_1Q,
            attention_mask=self._no_mask,
            past_key_values=self._keys,
            use_cache=True,
            logits_to_keep=wanted_F,
            plan=self._plan,
        )
        logits_FV: Tensor = output.logits[0]
        return logits_FV

    def _segments(self, batch: Batch) -> Iterator[QuerySegment]:
        first = 0
        for item in batch.items:
            masks = {window: self._additive(item.visible(window)) for window in self._windows}
            queries = slice(first, first + len(item.written))
            written = slice(item.written.start, item.written.stop)
            yield QuerySegment(queries, written, slice(item.start, item.written.stop), masks)
            first = queries.stop

    def _additive(self, mask_QK: BoolArray) -> Tensor | None:
        """Return the mask as all layers add it; None where attention needs none."""
        if is_causal(mask_QK):
            return None
        hidden_QK = torch.from_numpy(~mask_QK)
        mask = torch.zeros(hidden_QK.shape, dtype=self.model.dtype)
        mask = mask.masked_fill_(hidden_QK, float("-inf")).repeat(self._shared_heads, 1)
        return mask[None, None].to(self.model.device)
