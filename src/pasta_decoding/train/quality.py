"""How good the sampled answers to one prompt are: what a judge says, or a model's own measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.data.score import score_layouts
from pasta_decoding.lang.layout import Layout, Run, lay_out
from pasta_decoding.lang.measures import repeated_grams, text_quality
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.loading import load_model
from pasta_decoding.models.prompt import Message, PromptEncoder

Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> one number a text, larger is better."""

Nats = Callable[[str, Sequence[str]], list[float]]
"""(instruction, plain texts) -> nats per token of each text and its end."""


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
    """Load the sequential baseline; quality is how much a plain text is what it would write."""
    nats = load_nats(base, baseline, dtype=dtype, device=device)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        found = zip(nats(instruction, texts), texts, strict=True)
        return [text_quality(one, repeated_grams(text)) for one, text in found]

    return Quality("nats", rate, repeat_cost=2.0)


def load_nats(base: Path, adapter: Path, *, dtype: str, device: str = "cpu") -> Nats:
    """Load a model; return what tells how many nats a plain text costs it."""
    loaded = load_model(base, adapter, dtype=dtype)
    loaded.model.to(device).eval()
    binding = loaded.checkpoint.binding
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=binding.ids)
    scheme = scheme_named(loaded.checkpoint.scheme)
    end = min(loaded.ends)

    def plain_layout(prompt: Sequence[int], text: str) -> Layout:
        run = Run(tuple(encoder.encode_text(text))) if text else Run(())
        return lay_out(prompt, [run], scheme, async_close=binding.async_close, end=end)

    def nats(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        layouts = [plain_layout(prompt, text) for text in texts]
        return [-float(logprobs_L.mean()) for logprobs_L in score_layouts(loaded.model, layouts)]

    return nats
