"""What a model just trained does with a few prompts: does it promise, and is it faster for it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.measures import geometric_mean, tokens_per_step
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.load import Loaded, eos_ids_of
from pasta_decoding.runtime.local import decoder_over
from pasta_decoding.runtime.request import Rules, SamplingParams

RULES = Rules(max_tokens=200)


def tried(model: Any, tokenizer: Any, checkpoint: Checkpoint, prompts: Sequence[str]) -> str:
    """Answer the prompts greedily; return in a line how many have promises, and tokens a step."""
    model.eval()
    model.set_attn_implementation("sdpa")
    loaded = Loaded(model, tokenizer, checkpoint, eos_ids_of(model, tokenizer))
    decoder = decoder_over(TorchEngine(model, cache_tokens=4096), loaded)
    greedy = SamplingParams(temperature=0.0)
    answers = [decoder.answer(decoder.request(one, RULES, greedy)) for one in prompts]
    promising = sum("<promise" in answer.annotated for answer in answers)
    if not promising:
        return "no promises yet: more steps or rows"
    speeds = [
        tokens_per_step(decoder.plain_tokens(answer.text), answer.critical_path)
        for answer in answers
    ]
    return f"promises in {promising} of {len(answers)}, {geometric_mean(speeds):.1f} tokens a step"
