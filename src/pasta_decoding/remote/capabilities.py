"""Has a server Pasta's logits processor? A request of two tokens finds out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import islice

from pasta_decoding.remote.stream import BAN, Completion, RemoteError
from pasta_decoding.runtime.guided import GuidedParams, Kind

PROCESSOR = "pasta-decoding:"
"""With this the processor begins a refusal."""


async def has_processor(
    ask: Callable[[Completion], AsyncGenerator[int]],
    asked: Completion,
    params: GuidedParams,
    vocabulary_size: int,
) -> bool:
    """Return whether a server obeys the params of requests like `asked`.

    It is sent a request whose reply only the processor can bring: all that it brings is banned.
    Raises RemoteError if the server has a processor that is of no use, or does not answer at all.
    """
    free = (token for token in range(vocabulary_size) if token not in params.ids)
    verdicts = tuple(islice(free, 4))
    check = Completion(
        prompt=asked.prompt[:1],
        max_tokens=2,
        stops=(),
        end=asked.end,
        bias=dict.fromkeys(verdicts, BAN),
        params=replace(params, kind=Kind.check, verdicts=verdicts),
    )
    try:
        async with aclosing(ask(check)) as tokens:
            found = [token async for token in tokens]
    except RemoteError as error:
        _, is_ours, said = error.reason.partition(PROCESSOR)
        if is_ours:
            raise RemoteError(said.strip(), healthy=True) from error
        if error.retryable or not error.healthy:
            raise
        return False  # it refuses fields that it does not know
    well, seen, unseen, foreign = verdicts
    if found[:1] == [foreign]:
        raise RemoteError(
            "the model that it serves has not the reserved tokens that the answers need: serve "
            "what `pasta export --to hf` wrote",
            healthy=True,
        )
    if found == [well, unseen]:
        raise RemoteError(
            "its logits processor is not shown the tokens that were written",
            hint="--logits-processors pasta_decoding.vllm:PastaLogitsProcessor",
            healthy=True,
        )
    return found == [well, seen]
