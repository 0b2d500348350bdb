"""llama.cpp's own sequential loop, with nothing around it: the rival of every figure in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pasta_decoding.engines.llama import LlamaEngine

Choice = Callable[[Any], int | None]
"""From the logits of the last token [V] to the next token; None ends the loop."""


def llama_loop(engine: LlamaEngine, ids: Sequence[int], choose: Choice) -> float:
    """Return the seconds of `llama_decode`, prompt first, then one token after another.

    It works in the engine's context, which must have nothing open.
    """
    assert engine.slots_in_use == 0, "the loop needs the context for itself"
    llama, context = engine.library, engine.context
    batch = llama.llama_batch_init(len(ids), 0, 1)
    began_s, tokens, position = time.perf_counter(), list(ids), 0
    while True:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[len(tokens) - 1] = 1
        position += len(tokens)
        assert llama.llama_decode(context, batch) == 0, "the context has room for it"
        row = llama.llama_get_logits_ith(context, len(tokens) - 1)
        chosen = choose(np.ctypeslib.as_array(row, (engine.vocabulary_size,)))
        if chosen is None:
            break
        tokens = [chosen]
    taken_s = time.perf_counter() - began_s
    llama.llama_batch_free(batch)
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    return taken_s


def greedy(banned: list[int], ends: frozenset[int], max_tokens: int) -> tuple[Choice, list[int]]:
    """Return a greedy choice that ends as an answer does, and the list of what it chose."""
    written: list[int] = []

    def choose(logits_V: Any) -> int | None:
        logits_V[banned] = -np.inf
        written.append(int(logits_V.argmax()))
        return None if written[-1] in ends or len(written) == max_tokens else written[-1]

    return choose, written


def forced(tokens: Sequence[int]) -> Choice:
    """Return a choice of these tokens, whatever the logits say."""
    rest = iter(tokens)
    return lambda _: next(rest, None)
