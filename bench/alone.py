"""Answers decoded one after the other, and where other answers to their requests differ."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import (
    UNIT,
    Logits,
    RowParams,
    SampledToken,
    Sampler,
    hashes,
    weights,
)
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.data.rows import read_prompts
from pasta_decoding.lang.layout import MAIN, ChunkRun, SyncRun
from pasta_decoding.scheduling.decoder import LocalDecoder

TEMPERATURES = (0.0, 0.7, 1.0)
TOP_PS = (1.0, 1.0, 0.95)


class GapRecorder(Sampler):
    """Samples as its sampler does, and records how near each token was to another one.

    gaps: by the thread and the index of a token, in the order of sampling: how far its score lay
          above the second best.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler.params, sampler.request)
        self.gaps: dict[tuple[int, ...], float] = {}

    def accept(
        self, row: RowParams, wanted: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        logits_V = logits()
        score_V = scores(logits_V, row)
        gap = gap_of_best(score_V)
        if not allowed.admits(int(score_V.argmax())):
            candidates_V = allowed.candidates(len(score_V))
            any_has_a_score = score_V[candidates_V].max() > -np.inf
            deciding_V = score_V if any_has_a_score else logits_V
            gap = min(gap, gap_of_best(deciding_V[candidates_V]))
        self.gaps[row.key[2:]] = gap
        return super().accept(row, wanted, logits, allowed)


def scores(logits_V: Logits, row: RowParams) -> Logits:
    """Return score_V, of which the sampler takes the largest: logits and noise."""
    params = row.params
    if row.adjustment is not None:
        logits_V = row.adjustment.apply(logits_V)
    if params.greedy:
        return logits_V
    weight_V = weights(logits_V, params)
    order_V = np.argsort(-weight_V)
    heavier_V = np.cumsum(weight_V[order_V]) - weight_V[order_V]
    if params.top_p < 1:
        weight_V[order_V[heavier_V >= params.top_p * weight_V.sum()]] = 0
    arrival_V = -np.log1p(-(hashes(len(weight_V), row.key_halves) + 0.5) * UNIT)
    with np.errstate(divide="ignore"):
        score_V: Logits = params.temperature * (np.log(weight_V) - np.log(arrival_V))
    return score_V


def gap_of_best(score_V: Logits) -> float:
    """Return how far the best score lies above the next one."""
    if len(score_V) < 2:
        return np.inf
    second, first = np.partition(score_V, -2)[-2:]
    return float(first - second)


@dataclass(frozen=True)
class Reference:
    """A request that was decoded alone, its answer, and the `gaps` of its tokens."""

    question: str
    request: Request
    answer: Answer
    gaps: dict[tuple[int, ...], float]


def decode_references(decoder: LocalDecoder, options: Namespace) -> list[Reference]:
    """Decode requests one after the other, with questions and sampling drawn at random."""
    chance = Random(options.seed)
    references = []
    questions = read_prompts(options.questions)
    for seed in range(options.answers):
        question = chance.choice(questions)
        sampling = SamplingParams(chance.choice(TEMPERATURES), chance.choice(TOP_PS), seed=seed)
        request = decoder.request(question, Rules(max_tokens=options.max_tokens), sampling)
        recorder = GapRecorder(request.sampler)
        answer = decoder.answer(replace(request, sampler=recorder))
        references.append(Reference(question, request, answer, recorder.gaps))
        if (seed + 1) % 10 == 0:
            print(f"{seed + 1} of {options.answers} answers alone", file=sys.stderr)
    return references


def difference(reference: Reference, answer: Answer | str, close: int) -> dict[str, Any] | None:
    """Return where an answer first differs and the gap there; None if it does not differ.

    Of a text the tokens are not known: the gap is the smallest of all.
    """
    expected = reference.answer
    if isinstance(answer, str):
        if answer == expected.text:
            return None
        return {"gap": min(reference.gaps.values()), "got": answer}
    if (answer.segments, answer.end) == (expected.segments, expected.end):
        return None
    expected_tokens = tokens_of_threads(expected, close)
    tokens = tokens_of_threads(answer, close)
    for (thread, index), gap in reference.gaps.items():
        expected_token = expected_tokens[thread][index : index + 1]
        if expected_token != tokens.get(thread, [])[index : index + 1]:
            return {"thread": thread, "index": index, "gap": gap}
    return {"gap": np.inf}


def tokens_of_threads(answer: Answer, close: int) -> dict[int, list[int | None]]:
    """Return the tokens that each thread chose, with `close` after every chunk."""
    tokens: dict[int, list[int | None]] = {MAIN: []}
    for segment in answer.segments:
        match segment:
            case ChunkRun(ids):
                tokens[len(tokens)] = [*ids[1:], close]
            case SyncRun(token):
                tokens[MAIN].append(token)
            case _:
                tokens[MAIN] += segment.ids
    tokens[MAIN].append(answer.end)
    return tokens
