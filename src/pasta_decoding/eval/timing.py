"""Seconds: the same answer decoded in parallel and sequentially, and what the engine alone needs.

- replay speedup: seconds of the plain text decoded sequentially / seconds of the same answer
  decoded in parallel; all tokens forced, same engine, same process, one after the other.
- ideal seconds: prefill + the sum over the trace's steps of the bare model call at that width and
  cache length, measured in the same run.
- interpreter efficiency: ideal seconds / measured seconds of the parallel decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from pasta_decoding.lang.layout import Run
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder

BareCall = Callable[[int, int], float]
"""Seconds of one bare library call with this many tokens over this many cells."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one answer, three ways."""

    sequential_s: float
    parallel_s: float
    ideal_s: float

    @property
    def replay_speedup(self) -> float:
        """Sequential / parallel."""
        return self.sequential_s / self.parallel_s

    @property
    def interpreter_efficiency(self) -> float:
        """Ideal / measured."""
        return self.ideal_s / self.parallel_s


def time_answer(decoder: Decoder, prompt: Sequence[int], answer: Answer, bare: BareCall) -> Timing:
    """Replay `answer` in parallel and its plain text sequentially, and time the bare calls."""
    plain = [Run(tuple(decoder.encoder.encode_text(answer.text)))]
    sequential = decoder.answer(decoder.replay(prompt, plain))
    parallel = decoder.answer(decoder.replay(prompt, answer.segments))
    trace = parallel.trace
    cells = len(prompt)
    ideal_s = trace.prefill_s
    for step in trace.steps:
        ideal_s += bare(step.fed, cells)
        cells += step.fed
    return Timing(sequential.seconds, parallel.seconds, ideal_s)


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
            times = sorted(self._call(*key) for _ in range(self._repeats))
            self._known[key] = times[len(times) // 2]
        return self._known[key]


def transformers_call(model: PreTrainedModel) -> BareCall:
    """Return the plain `transformers` forward of `model`, with its own cache and attention."""

    def call(width: int, cells: int) -> float:
        ours = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            return _timed_forward(model, width, cells)
        finally:
            model.set_attn_implementation(ours)

    return call


@torch.inference_mode()
def _timed_forward(model: PreTrainedModel, width: int, cells: int) -> float:
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = torch.zeros(1, config.num_key_value_heads, cells, head, dtype=model.dtype)
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        cache.update(past.clone(), past.clone(), layer)
    alone = torch.full((width, width), float("-inf"), dtype=model.dtype).fill_diagonal_(0)
    mask = torch.cat([torch.zeros(width, cells, dtype=model.dtype), alone], dim=1)[None, None]
    began_s = time.perf_counter()
    model(
        input_ids=torch.zeros(1, width, dtype=torch.long),
        position_ids=torch.full((1, width), cells),
        attention_mask=mask if width > 1 else None,
        past_key_values=cache,
    )
    return time.perf_counter() - began_s
