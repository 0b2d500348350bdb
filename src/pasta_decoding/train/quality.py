"""How good the sampled answers to one prompt are: what a judge says, or a model's own measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.data.score import score_layouts
from pasta_decoding.lang.layout import Layout, Run, lay_out
from pasta_decoding.lang.measures import repeated_grams
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.loading import load_model
from pasta_decoding.models.prompt import Message, PromptEncoder

Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> one number a text, larger is better."""

GRAMS_COST = 4.0
"""Nats per token that a text costs if all its runs of four words are repeated.

A token of a repetition costs a model next to nothing instead of the two nats or so of a new one,
so a share r of them saves 2 r. The penalty must be more than that.
"""


@dataclass(frozen=True, slots=True)
class Quality:
    """A measure of quality, in a unit of its own.

    rate:        see `Rate`.
    repeat_cost: what an answer loses, in that unit, if all its chunks repeat a sibling. A plain
                 text does not show its chunks, so this is taken off here.
    """

    name: str
    rate: Rate
    repeat_cost: float


def nats_quality(base: Path, baseline: Path, *, dtype: str, device: str = "cpu") -> Quality:
    """Load the sequential baseline; quality is how much a plain text is what it would write.

    Minus nats per token of the whole text and its end, minus `GRAMS_COST` times its repetition.
    """
    loaded = load_model(base, baseline, dtype=dtype)
    loaded.model.to(device).eval()
    binding = loaded.checkpoint.binding
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=binding.ids)
    scheme = scheme_named(loaded.checkpoint.scheme)
    end = min(loaded.ends)

    def plain_layout(prompt: Sequence[int], text: str) -> Layout:
        run = Run(tuple(encoder.encode_text(text))) if text else Run(())
        return lay_out(prompt, [run], scheme, async_close=binding.async_close, end=end)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        layouts = [plain_layout(prompt, text) for text in texts]
        scored = score_layouts(loaded.model, layouts)
        return [
            float(logprobs_L.mean()) - GRAMS_COST * repeated_grams(text)
            for logprobs_L, text in zip(scored, texts, strict=True)
        ]

    return Quality("nats", rate, repeat_cost=2.0)
