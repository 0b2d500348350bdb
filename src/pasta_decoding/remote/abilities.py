"""What a server can do beyond completions: found out by a request of two tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import islice

from pasta_decoding.remote.completions import BAN, Abilities, Completion, RemoteError
from pasta_decoding.runtime.briefs import Brief, Kind

Ask = Callable[[Completion, Abilities], AsyncGenerator[int]]
"""Sends a request, in the dialect of a server with these abilities, and yields what comes."""

PROCESSOR = "pasta-decoding:"
"""With this begins what the processor says when it refuses a request."""
_INSTALL = "Install the same version of Pasta beside vLLM, or none: then it works by corrections."


async def find_abilities(
    ask: Ask, asked: Completion, brief: Brief, vocabulary_size: int
) -> Abilities:
    """Return what a server can do for requests like `asked`.

    Raises RemoteError if it has a processor that is of no use to them, or does not answer at all.
    """
    check = _check(asked, brief, vocabulary_size)
    assert check.brief is not None, "as it was made"
    for priority in (True, False):
        try:
            async with aclosing(ask(check, Abilities(processor=True, priority=priority))) as tokens:
                found = [token async for token in tokens]
        except RemoteError as error:
            if PROCESSOR in error.reason:
                said = error.reason[error.reason.index(PROCESSOR) + len(PROCESSOR) :].strip()
                raise RemoteError(said, hint=_INSTALL, healthy=True) from error
            if error.retryable or not error.healthy:
                raise
        else:
            return Abilities(processor=_is_held(check.brief, found), priority=priority)
    return Abilities()


def _check(asked: Completion, brief: Brief, vocabulary_size: int) -> Completion:
    """Return a request whose reply only the processor can bring: all that it brings is banned."""
    free = (token for token in range(vocabulary_size) if token not in brief.ids)
    verdicts = tuple(islice(free, 4))
    return Completion(
        prompt=asked.prompt[:1],
        max_tokens=2,
        stops=(),
        end=asked.end,
        bias=dict.fromkeys(verdicts, BAN),
        brief=replace(brief, kind=Kind.check, verdicts=verdicts),
        priority=1,
    )


def _is_held(brief: Brief, found: list[int]) -> bool:
    well, seen, unseen, foreign = brief.verdicts
    if found[:1] == [foreign]:
        raise RemoteError(
            "the model that it serves has not the reserved tokens that the answers need",
            hint="Serve the checkpoint that `pasta export --to hf` wrote.",
            healthy=True,
        )
    if found == [well, unseen]:
        raise RemoteError(
            "its logits processor is not shown the tokens that were written",
            hint="Start it with --logits-processors pasta_decoding.vllm:PastaLogitsProcessor.",
            healthy=True,
        )
    return found == [well, seen]
