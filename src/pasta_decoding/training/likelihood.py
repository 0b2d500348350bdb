"""Rating texts without a judge: by their likelihood under the baseline, less repetition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pasta_decoding.lang.layout import Run, lay_out
from pasta_decoding.lang.measures import rep_4
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.load import load_model
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.loss import score_layouts
from pasta_decoding.training.score import Rate

REP_4_COST = 4.0
"""Nats per token that a text costs if all its runs of four words are repeated.

A token of a repetition costs a model next to nothing instead of the two nats or so of a new one,
so a share r of them saves 2 r. The penalty must be more than that.
"""


def likelihood_rate(base: Path, adapter: Path, *, dtype: str, device: str = "cpu") -> Rate:
    """Load a model; return what rates plain texts by their likelihood under it, less rep-4."""
    loaded = load_model(base, adapter, dtype=dtype)
    loaded.model.to(device).eval()
    checkpoint = loaded.checkpoint
    close, scheme = checkpoint.control.async_close, scheme_named(checkpoint.scheme)
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=checkpoint.control.ids)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        runs = [Run(tuple(encoder.encode_text(text)) if text else ()) for text in texts]
        layouts = [
            lay_out(prompt, [run], scheme, async_close=close, end=loaded.end) for run in runs
        ]
        scored = zip(score_layouts(loaded.model, layouts), texts, strict=True)
        return [float(logprobs_L.mean()) - REP_4_COST * rep_4(text) for logprobs_L, text in scored]

    return rate
