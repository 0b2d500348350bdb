"""The bare library call of each engine: what a step costs without anything of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.llama import LlamaEngine
from pasta_decoding.engines.torch import TorchEngine

BareCall = Callable[[int, int, int], list[float]]
"""Seconds of bare library calls: (tokens of a call, cells before it, how many calls)."""

StepTime = Callable[[int, int], float]
"""Seconds of a bare step: (tokens, cells before it)."""


class BareTimes:
    """Times of the bare call, measured once for each width and stretch of cache length."""

    STRETCH = 64

    def __init__(self, call: BareCall, repeats: int = 5) -> None:
        self._call = call
        self._repeats = repeats
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, width: int, cells: int) -> float:
        """Return the median seconds at this width, with the cache length rounded to a stretch."""
        key = (width, max(1, round(cells / self.STRETCH)) * self.STRETCH)
        if key not in self._known:
            self._known[key] = median(self._call(*key, self._repeats))
        return self._known[key]


def transformers_call(model: PreTrainedModel) -> BareCall:
    """Return the plain `transformers` forward of `model`, with its own cache and attention."""

    def call(width: int, cells: int, repeats: int) -> list[float]:
        ours = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            return [_timed_forward(model, width, cells) for _ in range(repeats)]
        finally:
            model.set_attn_implementation(ours)

    return call


@torch.inference_mode()
def _timed_forward(model: PreTrainedModel, width: int, cells: int) -> float:
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    on: Any = {"device": model.device}
    past = torch.zeros(1, config.num_key_value_heads, cells, head, dtype=model.dtype, **on)
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        cache.update(past.clone(), past.clone(), layer)
    alone = torch.full((width, width), float("-inf"), dtype=model.dtype, **on).fill_diagonal_(0)
    shared = torch.zeros(width, cells, dtype=model.dtype, **on)
    inputs = {
        "input_ids": torch.zeros(1, width, dtype=torch.long, **on),
        "position_ids": torch.full((1, width), cells, **on),
        "attention_mask": torch.cat([shared, alone], dim=1)[None, None] if width > 1 else None,
    }
    began_s = time.perf_counter()
    output = model(**inputs, past_key_values=cache)
    output.logits.cpu()  # waits for a GPU
    return time.perf_counter() - began_s


def bare_call(engine: Engine) -> BareCall:
    """Return the bare call of the library below `engine`."""
    if isinstance(engine, LlamaEngine):
        return llama_call(engine)
    assert isinstance(engine, TorchEngine), "the engines with a library below"
    return compiled_call(engine) if engine.is_compiled else transformers_call(engine.model)


def compiled_call(engine: TorchEngine) -> BareCall:
    """Return the call of the compiled program and of nothing else."""

    def call(width: int, cells: int, repeats: int) -> list[float]:
        run = engine.compiled_call(width, cells)
        return [_seconds(run) for _ in range(repeats)]

    return call


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def llama_call(engine: LlamaEngine) -> BareCall:
    """Return `llama_decode` of one token for each of some sequences with a common beginning.

    It works in the engine's context, which must have nothing open. A cache longer than the context
    is cut to what fits.
    """

    def call(width: int, cells: int, repeats: int) -> list[float]:
        assert engine.slots_in_use == 0, "the bare call needs the context for itself"
        llama, context = engine.library, engine.context
        cells = min(cells, engine.max_slots - width)
        memory = llama.llama_get_memory(context)
        size = llama.llama_n_batch(context)
        batch = llama.llama_batch_init(size, 0, 1)
        try:
            for first in range(0, cells, size):
                rest = range(first, min(first + size, cells))
                _fill(batch, [(0, position, False) for position in rest])
                assert llama.llama_decode(context, batch) == 0, "the context holds as many"
            for sequence in range(1, width):
                llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
            _fill(batch, [(sequence, cells, True) for sequence in range(width)])
            times = []
            for _ in range(repeats):
                began_s = time.perf_counter()
                assert llama.llama_decode(context, batch) == 0, "the context has room for it"
                llama.llama_get_logits_ith(context, width - 1)
                times.append(time.perf_counter() - began_s)
                llama.llama_memory_seq_rm(memory, -1, cells, -1)
            return times
        finally:
            llama.llama_batch_free(batch)
            llama.llama_memory_clear(memory, False)

    return call


def _fill(batch: Any, tokens: Sequence[tuple[int, int, bool]]) -> None:
    """Put (sequence, position, wants logits) into a llama batch; the token itself is no matter."""
    batch.n_tokens = len(tokens)
    for i, (sequence, position, wanted) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = 1, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
