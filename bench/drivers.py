"""Who decodes a turn of prompts: llama.cpp's own loop, `transformers.generate`, Pasta."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import common  # noqa: F401  finds the tests' helpers
import numpy as np
import torch

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines.llama import BATCH_TOKENS, LlamaEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import MainRun, Segment
from pasta_decoding.lang.tree import Tree, strip, without_topics
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.training.examples import segments_of
from tests.law.watched import replay

Choice = Callable[[Any], int | None]
"""From the logits of a sequence's last token [V] to its next token; None ends the sequence."""
Row = tuple[int, int, int, bool]
"""A token of a pass: its sequence, its position, the token, and whether its logits are needed."""
NGRAMS = (3, 2)
"""How many tokens prompt lookup searches for. One token drafts often, and is seldom right."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the answer to be forced; None: greedy."""

    prompt: str
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """The measurements of a turn.

    seconds:  of the whole turn.
    prompt_s: of the prompts.
    answer_s: of an answer, the median.
    written:  the plain tokens of each answer.
    passes:   forward passes of the turn.
    """

    seconds: float
    prompt_s: float
    answer_s: float
    written: list[list[int]]
    passes: int

    @property
    def tokens(self) -> int:
        return max(1, sum(map(len, self.written)))

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens

    @property
    def token_behind_prompt_s(self) -> float:
        return (self.seconds - self.prompt_s) / self.tokens


def by_pasta(
    decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int, *, parallel: bool
) -> Timed:
    requests = [request_of(decoder, task, max_tokens, parallel=parallel) for task in turn]
    scheduler = decoder.scheduler(prefix_caching=False)
    began_s = time.perf_counter()
    generations = [scheduler.add(request) for request in requests]
    steps = 0
    while scheduler.busy:
        scheduler.step()
        steps += 1
    seconds = time.perf_counter() - began_s
    results = [generation.result() for generation in generations]
    answers = [answer for answer in results if answer is not None]
    for task, answer in zip(turn, answers, strict=True):
        assert task.tree is None or answer.text == strip(task.tree), "it was forced"
    return Timed(
        seconds,
        max(answer.trace.prefill_s for answer in answers),
        median(answer.seconds for answer in answers),
        [decoder.encoder.encode_text(answer.text) for answer in answers],
        steps,
    )


def request_of(decoder: LocalDecoder, task: Task, max_tokens: int, *, parallel: bool) -> Request:
    if task.tree is None:
        rules = Rules(max_tokens=max_tokens, parallel=parallel)
        return decoder.request(task.prompt, rules, SamplingParams())
    segments: list[Segment] = [MainRun(tuple(plain_ids(decoder, task)))]
    if parallel:
        tree = task.tree if decoder.topic else without_topics(task.tree)
        segments = segments_of(tree, decoder.vocabulary.control, decoder.encoder)
    prompt = decoder.prompt_ids(task.prompt, max_tokens)
    return replay(decoder, prompt, segments, decoder.vocabulary.end)


def plain_ids(decoder: LocalDecoder, task: Task) -> list[int]:
    """Return the tokens of a forced answer's plain text."""
    return [] if task.tree is None else decoder.encoder.encode_text(strip(task.tree))


def by_llama(
    decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int, *, drafted: int = 0
) -> Timed:
    """Time llama.cpp's loop, with prompt lookup if it may draft tokens."""
    assert isinstance(decoder.engine, LlamaEngine), "the loop is llama.cpp's"
    banned = sorted(decoder.vocabulary.control.ids)
    choices = []
    written = []
    for task in turn:
        if task.tree is None:
            choice, tokens = greedy(banned, decoder.vocabulary.eos_ids, max_tokens)
        else:
            tokens = plain_ids(decoder, task)
            choice = forced(tokens)
        choices.append(choice)
        written.append(tokens)
    prompts = [decoder.prompt_ids(task.prompt, max_tokens) for task in turn]
    prompt_s, ended_s, steps = llama_loop(decoder.engine, prompts, choices, drafted)
    return Timed(max(ended_s), prompt_s, median(ended_s), written, steps)


def llama_loop(
    engine: LlamaEngine,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    drafted: int = 0,
) -> tuple[float, list[float], int]:
    """Decode prompts side by side, a sequence each; a pass holds the new tokens of every sequence.

    After them it holds up to `drafted` tokens that may follow; those that are then chosen stay in
    the cache. Return the seconds of the prompts, the seconds after which each sequence ended, and
    the number of passes. The loop works in the engine's context, which must have nothing open.
    """
    assert engine.slots_in_use == 0, "the loop needs the context for itself"
    llama = engine.library
    began_s = time.perf_counter()
    batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
    memory = llama.llama_get_memory(engine.context)
    texts = dict(enumerate(map(list, prompts)))
    cached_tokens = [0] * len(prompts)
    ended_s = [0.0] * len(prompts)
    prompts_s = 0.0
    steps = 0
    while texts:
        rows: list[Row] = []
        drafts = {number: looked_up(text, drafted) for number, text in texts.items()}
        for number, text in texts.items():
            rows += rows_of(number, text, drafts[number], cached_tokens[number])
        chosen = next_tokens(passes(engine, batch, rows), drafts, choices)
        now_s = time.perf_counter() - began_s
        prompts_s = prompts_s or now_s
        steps += 1
        for number, (*accepted, last) in chosen.items():
            if last is None:
                ended_s[number] = now_s
                del texts[number]
                continue
            texts[number] += [*accepted, last]
            cached_tokens[number] = len(texts[number]) - 1
            trimmed = llama.llama_memory_seq_rm(memory, number, cached_tokens[number], -1)
            assert trimmed, "the cache can be cut anywhere"
    llama.llama_batch_free(batch)
    llama.llama_memory_clear(memory, False)
    return prompts_s, ended_s, steps


def rows_of(
    number: int, text: Sequence[int], draft: Sequence[int], cached_tokens: int
) -> Iterator[Row]:
    """Yield the tokens of a sequence that are not in the cache, and its draft."""
    new_tokens = [*text[cached_tokens:], *draft]
    for position, token in enumerate(new_tokens, cached_tokens):
        needs_logits = position >= len(text) - 1
        yield number, position, token, needs_logits


def next_tokens(
    logits: Iterator[tuple[int, Any]],
    drafts: Mapping[int, Sequence[int]],
    choices: Sequence[Choice],
) -> dict[int, list[Any]]:
    """Return the tokens that each sequence chooses, up to the first that is not its draft's."""
    chosen: dict[int, list[Any]] = {number: [] for number in drafts}
    for number, logits_V in logits:
        tokens = chosen[number]
        if tokens == drafts[number][: len(tokens)]:  # else the row follows a wrong token
            tokens.append(choices[number](logits_V))
    return chosen


def passes(engine: LlamaEngine, batch: Any, rows: Sequence[Row]) -> Iterator[tuple[int, Any]]:
    """Decode the rows; yield sequence and logits of each row that needs them."""
    for start in range(0, len(rows), BATCH_TOKENS):
        batch_rows = rows[start : start + BATCH_TOKENS]
        for index, (number, position, token, needs_logits) in enumerate(batch_rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.logits[index] = needs_logits
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = number
        batch.n_tokens = len(batch_rows)
        assert engine.library.llama_decode(engine.context, batch) == 0, "the context has room"
        for index, (number, _, _, needs_logits) in enumerate(batch_rows):
            if needs_logits:
                pointer = engine.library.llama_get_logits_ith(engine.context, index)
                yield number, np.ctypeslib.as_array(pointer, (engine.vocabulary_size,))


def looked_up(text: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Return the tokens after the latest earlier place where the text's last tokens stood."""
    if max_tokens == 0:
        return []
    for size in NGRAMS:
        ngram = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == ngram:
                return text[start + size :][:max_tokens]
    return []


def greedy(banned: list[int], ends: frozenset[int], max_tokens: int) -> tuple[Choice, list[int]]:
    """Return a greedy choice that ends as an answer does, and the list that its tokens go to."""
    written: list[int] = []

    def choose_greedily(logits_V: Any) -> int | None:
        logits_V[banned] = -np.inf
        token = int(logits_V.argmax())
        if token in ends:
            return None
        written.append(token)
        return None if len(written) == max_tokens else token

    return choose_greedily, written


def forced(tokens: Sequence[int]) -> Choice:
    """Return a choice of these tokens, whatever the logits say."""
    coming_tokens = iter(tokens)
    return lambda _: next(coming_tokens, None)


def by_transformers(decoder: LocalDecoder, turn: Sequence[Task], max_tokens: int) -> Timed:
    """Time `generate` with transformers' own attention; static cache and graphs on a GPU."""
    assert isinstance(decoder.engine, TorchEngine), "its model is one of transformers"
    model: Any = decoder.engine.model
    prompts = [decoder.prompt_ids(task.prompt, max_tokens) for task in turn]
    size = max(map(len, prompts))
    end = decoder.vocabulary.end
    forced_tokens = max(len(plain_ids(decoder, task)) for task in turn)
    prompt_BT = torch.tensor(
        [[end] * (size - len(ids)) + list(ids) for ids in prompts], device=model.device
    )
    mask_BT = torch.tensor(
        [[0] * (size - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
    )
    settings = {"cache_implementation": "static"} if model.device.type == "cuda" else {}
    attention = model.config._attn_implementation
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
    model.set_attn_implementation(attention)
    written = [row_T[row_T != end].tolist() for row_T in output_BT[:, size:]]
    return Timed(taken_s, 0.0, taken_s, written, output_BT.shape[1] - size)
