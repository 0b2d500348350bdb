"""What a request cost, as its reply tells it."""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.server.schema import PromptTokensDetails, Usage


def usage_of(answers: Sequence[Answer], prompt_tokens: int, plain_tokens: int) -> Usage:
    """Return the figures of a request's answers; prompts are counted once, not for each choice."""
    fed = sum(answer.fed_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=fed,
        total_tokens=prompt_tokens + fed,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens(answers)),
        plain_tokens=plain_tokens,
        critical_path=max(answer.critical_path for answer in answers),
        threads=max(1 + answer.chunks for answer in answers),
        trimmed_tokens=sum(answer.trimmed_tokens for answer in answers),
    )


def cached_tokens(answers: Sequence[Answer]) -> int:
    """Return how many tokens of the prompts none of the answers had computed."""
    least: dict[tuple[int, ...], int] = {}
    for answer in answers:
        prompt = answer.layouts[0].tokens[: answer.trace.prompt_tokens]
        reused = answer.trace.reused_tokens
        least[prompt] = min(reused, least.get(prompt, reused))
    return sum(least.values())
