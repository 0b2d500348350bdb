"""A forward pass, and the tokens that follow from it: drawn where the logits are.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pasta_decoding.engines.base import Engine, Feed, FloatArray, KeepsLogits
from pasta_decoding.runtime.generation import Row
from pasta_decoding.runtime.sampler import Sampler


def step(engine: Engine, rows: Sequence[Row]) -> None:
    """Feed `rows`, and let the thread of each that wants logits choose its next token."""
    feeds = [row.feed for row in rows]
    wanting = [row for row in rows if row.feed.wants_logits]
    drawing = all(isinstance(row.generation.request.sampler, Sampler) for row in wanting)
    if drawing and isinstance(engine, KeepsLogits) and engine.keeps_logits:
        _step_on_device(engine, feeds, wanting)
        return
    for row, logits_V in zip(wanting, engine.step(feeds), strict=True):
        row.generation.choose(row.thread, logits_V)


def _step_on_device(engine: KeepsLogits, feeds: Sequence[Feed], wanting: Sequence[Row]) -> None:
    """Draw for all rows at once; a row is fetched where what was drawn may not stand."""
    from pasta_decoding.runtime.device_sampler import sampled_rows

    logits_FV = engine.step_kept(feeds)

    def fetch(row: int) -> FloatArray:
        logits_V: FloatArray = logits_FV[row].cpu().numpy()
        return logits_V

    params = [row.generation.row_params(row.thread) for row in wanting]
    tokens = sampled_rows(logits_FV, params) if params else []
    for number, (row, one, token) in enumerate(zip(wanting, params, tokens, strict=True)):
        row.generation.accept(row.thread, one, token, partial(fetch, number))
