"""Rating texts without a judge: by their likelihood under a sequential model, less repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pasta_decoding.lang.layout import Layout, Run, lay_out
from pasta_decoding.lang.measures import rep_4
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.load import load_model
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.loss import score_layouts
from pasta_decoding.training.score import Rate

Nll = Callable[[str, Sequence[str]], list[float]]
"""(instruction, plain texts) -> NLL per token (nats) of each text and its end."""

REP_4_COST = 4.0
"""Nats per token that a text costs if all its runs of four words are repeated.

A token of a repetition costs a model next to nothing instead of the two nats or so of a new one,
so a share r of them saves 2 r. The penalty must be more than that.
"""


def likelihood_rate(nll: Nll) -> Rate:
    """Return what rates plain texts by their likelihood under the model of `nll`, less rep-4."""

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        found = zip(nll(instruction, texts), texts, strict=True)
        return [-one - REP_4_COST * rep_4(text) for one, text in found]

    return rate


def load_nll(base: Path, adapter: Path, *, dtype: str, device: str = "cpu") -> Nll:
    """Load a model; return what tells the NLL per token of plain texts under it."""
    loaded = load_model(base, adapter, dtype=dtype)
    loaded.model.to(device).eval()
    control = loaded.checkpoint.control
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    scheme = scheme_named(loaded.checkpoint.scheme)
    end = loaded.end

    def plain_layout(prompt: Sequence[int], text: str) -> Layout:
        run = Run(tuple(encoder.encode_text(text))) if text else Run(())
        return lay_out(prompt, [run], scheme, async_close=control.async_close, end=end)

    def nll(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        layouts = [plain_layout(prompt, text) for text in texts]
        return [-float(logprobs_L.mean()) for logprobs_L in score_layouts(loaded.model, layouts)]

    return nll
