"""Who decodes a turn of prompts: llama.cpp's own loop, `transformers.generate`, Pasta."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import common  # noqa: F401  finds the tests' helpers
import numpy as np
import torch

from pasta_decoding.engines.llama import BATCH_TOKENS, LlamaEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import Run, Segment
from pasta_decoding.lang.tree import Tree, strip, without_topics
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.training.sft import segments_of
from tests.law.watched import replay

Choice = Callable[[Any], int | None]
"""From the logits of a sequence's last token [V] to its next token; None ends the sequence."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the answer to be forced; None: greedy."""

    prompt: str
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """What one turn took: seconds of all, of the prompts, of an answer; and plain tokens of all."""

    seconds: float
    prompt_s: float
    answer_s: float
    tokens: int

    @property
    def token_s(self) -> float:
        return self.seconds / max(1, self.tokens)

    @property
    def token_behind_prompt_s(self) -> float:
        return (self.seconds - self.prompt_s) / max(1, self.tokens)


def by_pasta(
    decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int, *, parallel: bool
) -> Timed:
    requests = [request_of(decoder, task, max_tokens, parallel=parallel) for task in turn]
    scheduler, began_s = decoder.scheduler(prefix_caching=False), time.perf_counter()
    generations = [scheduler.add(request) for request in requests]
    while scheduler.busy:
        scheduler.step()
    seconds = time.perf_counter() - began_s
    answers = [answer for one in generations if (answer := one.result())]
    for task, answer in zip(turn, answers, strict=True):
        assert task.tree is None or answer.text == strip(task.tree), "it was forced"
    return Timed(
        seconds,
        max(answer.trace.prefill_s for answer in answers),
        median(answer.seconds for answer in answers),
        sum(decoder.plain_tokens(answer.text) for answer in answers),
    )


def request_of(decoder: LocalDecoder, task: Task, max_tokens: int, *, parallel: bool) -> Request:
    if task.tree is None:
        rules = Rules(max_tokens=max_tokens, parallel=parallel)
        return decoder.request(task.prompt, rules, SamplingParams())
    segments: list[Segment] = [Run(tuple(plain_ids(decoder, task)))]
    if parallel:
        tree = task.tree if decoder.topic else without_topics(task.tree)
        segments = segments_of(tree, decoder.vocabulary.control, decoder.encoder)
    prompt = decoder.prompt_ids(task.prompt, max_tokens)
    return replay(decoder, prompt, segments, decoder.vocabulary.end)


def plain_ids(decoder: LocalDecoder, task: Task) -> list[int]:
    """Return the tokens of a forced answer's plain text."""
    return [] if task.tree is None else decoder.encoder.encode_text(strip(task.tree))


def by_llama(decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int) -> Timed:
    assert isinstance(decoder.engine, LlamaEngine), "the loop is llama.cpp's"
    banned = sorted(decoder.vocabulary.control.ids)
    choices, written = [], []
    for task in turn:
        tokens = plain_ids(decoder, task)
        choose = forced(tokens)
        if task.tree is None:
            choose, tokens = greedy(banned, decoder.vocabulary.eos_ids, max_tokens)
        choices.append(choose)
        written.append(tokens)
    prompts = [decoder.prompt_ids(task.prompt, max_tokens) for task in turn]
    prompt_s, ended_s = llama_loop(decoder.engine, prompts, choices)
    return Timed(max(ended_s), prompt_s, median(ended_s), sum(map(len, written)))


def llama_loop(
    engine: LlamaEngine, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]
) -> tuple[float, list[float]]:
    """Decode prompts side by side, a sequence each; a pass holds one token of every sequence.

    Return the seconds of the prompts, and those after which each sequence ended. The loop works in
    the engine's context, which must have nothing open.
    """
    assert engine.slots_in_use == 0, "the loop needs the context for itself"
    llama, began_s = engine.library, time.perf_counter()
    batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
    coming = {number: list(ids) for number, ids in enumerate(prompts)}
    held, ended_s, prompts_s = [0] * len(prompts), [0.0] * len(prompts), 0.0
    while coming:
        chosen = {}
        for number, logits_V in passes(engine, batch, coming, held):
            chosen[number] = choices[number](logits_V)
        now_s = time.perf_counter() - began_s
        prompts_s = prompts_s or now_s
        for number, token in chosen.items():
            ended_s[number] = now_s if token is None else 0.0
        coming = {number: [token] for number, token in chosen.items() if token is not None}
    llama.llama_batch_free(batch)
    llama.llama_memory_clear(llama.llama_get_memory(engine.context), False)
    return prompts_s, ended_s


def passes(
    engine: LlamaEngine, batch: Any, coming: dict[int, list[int]], held: list[int]
) -> Iterator[tuple[int, Any]]:
    """Decode the coming tokens of each sequence; yield its number and its last token's logits."""
    rows = [(number, token) for number, ids in coming.items() for token in ids]
    lasts = {number: held[number] + len(ids) - 1 for number, ids in coming.items()}
    for start in range(0, len(rows), BATCH_TOKENS):
        wanted = []
        for i, (number, token) in enumerate(part := rows[start : start + BATCH_TOKENS]):
            last = held[number] == lasts[number]
            batch.token[i], batch.pos[i], batch.logits[i] = token, held[number], last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
            held[number] += 1
            wanted += [(i, number)] * last
        batch.n_tokens = len(part)
        assert engine.library.llama_decode(engine.context, batch) == 0, "the context has room"
        for i, number in wanted:
            row = engine.library.llama_get_logits_ith(engine.context, i)
            yield number, np.ctypeslib.as_array(row, (engine.vocabulary_size,))


def greedy(banned: list[int], ends: frozenset[int], max_tokens: int) -> tuple[Choice, list[int]]:
    """Return a greedy choice that ends as an answer does, and the list of what it chose."""
    written: list[int] = []

    def choose(logits_V: Any) -> int | None:
        logits_V[banned] = -np.inf
        token = int(logits_V.argmax())
        if token in ends:
            return None
        written.append(token)
        return None if len(written) == max_tokens else token

    return choose, written


def forced(tokens: Sequence[int]) -> Choice:
    """Return a choice of these tokens, whatever the logits say."""
    rest = iter(tokens)
    return lambda _: next(rest, None)


def by_transformers(decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int) -> Timed:
    """Time `generate` with transformers' own attention; static cache and graphs on a GPU."""
    assert isinstance(decoder.engine, TorchEngine), "its model is one of transformers"
    model: Any = decoder.engine.model
    prompts = [decoder.prompt_ids(task.prompt, max_tokens) for task in turn]
    size, end = max(map(len, prompts)), decoder.vocabulary.end
    forced_tokens = max(len(plain_ids(decoder, task)) for task in turn)
    prompt_BT = torch.tensor(
        [[end] * (size - len(ids)) + list(ids) for ids in prompts], device=model.device
    )
    mask_BT = torch.tensor(
        [[0] * (size - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
    )
    settings = {"cache_implementation": "static"} if model.device.type == "cuda" else {}
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    began_s = time.perf_counter()
    output_BT = model.generate(
        prompt_BT,
        attention_mask=mask_BT,
        max_new_tokens=forced_tokens or max_tokens,
        min_new_tokens=forced_tokens or None,
        do_sample=False,
        pad_token_id=end,
        suppress_tokens=sorted(decoder.vocabulary.control.ids),
        **settings,
    )
    taken_s = time.perf_counter() - began_s
    model.set_attn_implementation(own)
    tokens = int((output_BT[:, size:] != end).sum())
    return Timed(taken_s, 0.0, taken_s, tokens)
