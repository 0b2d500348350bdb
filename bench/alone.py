"""Answers decoded alone, how near each of their tokens was to another, and what differs."""

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

TEMPERATURES, TOP_PS = (0.0, 0.7, 1.0), (1.0, 1.0, 0.95)


class Watching(Sampler):
    """Samples as its sampler does. `gaps`: of each token, by thread and place, in their order."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler.params, sampler.request)
        self.gaps: dict[tuple[int, ...], float] = {}

    def accept(
        self, row: RowParams, wanted: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        logits_V = logits()
        score_V = scores(logits_V, row)
        gap = lead(score_V)
        if not allowed.admits(int(score_V.argmax())):
            candidates_V = allowed.candidates(len(score_V))
            in_race = score_V[candidates_V].max() > -np.inf
            gap = min(gap, lead((score_V if in_race else logits_V)[candidates_V]))
        self.gaps[row.key[2:]] = gap
        return super().accept(row, wanted, logits, allowed)


def scores(logits_V: Logits, row: RowParams) -> Logits:
    """Return what the largest of is chosen: logits, and noise scaled by the temperature."""
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
        found: Logits = params.temperature * (np.log(weight_V) - np.log(arrival_V))
    return found


def lead(score_V: Logits) -> float:
    """Return how far the best score lies above the next one."""
    if len(score_V) < 2:
        return np.inf
    second, first = np.partition(score_V, -2)[-2:]
    return float(first - second)


@dataclass(frozen=True)
class Lone:
    """A request decoded alone: what it asks, its answer, and how near each token was to another."""

    question: str
    request: Request
    answer: Answer
    gaps: dict[tuple[int, ...], float]


def decoded_alone(decoder: LocalDecoder, options: Namespace) -> list[Lone]:
    chance, found = Random(options.seed), []
    questions = read_prompts(options.questions)
    for seed in range(options.answers):
        question = chance.choice(questions)
        sampling = SamplingParams(chance.choice(TEMPERATURES), chance.choice(TOP_PS), seed=seed)
        request = decoder.request(question, Rules(max_tokens=options.max_tokens), sampling)
        watching = Watching(request.sampler)
        answer = decoder.answer(replace(request, sampler=watching))
        found.append(Lone(question, request, answer, watching.gaps))
        if (seed + 1) % 10 == 0:
            print(f"{seed + 1} of {options.answers} answers alone", file=sys.stderr)
    return found


def difference(lone: Lone, got: Answer | str, close: int) -> dict[str, Any] | None:
    """Return where an answer first differs, and by how much; None if it does not."""
    if isinstance(got, str):
        same = got == lone.answer.text
        return None if same else {"gap": min(lone.gaps.values()), "got": got}
    if (got.segments, got.end) == (lone.answer.segments, lone.answer.end):
        return None
    right, other = written(lone.answer, close), written(got, close)
    for (thread, index), gap in lone.gaps.items():
        if right[thread][index : index + 1] != other.get(thread, [])[index : index + 1]:
            return {"thread": thread, "index": index, "gap": gap}
    return {"gap": np.inf}


def written(answer: Answer, close: int) -> dict[int, list[int | None]]:
    """Return the tokens that each thread chose, and `close` behind every chunk."""
    found: dict[int, list[int | None]] = {MAIN: []}
    for segment in answer.segments:
        match segment:
            case ChunkRun(ids):
                found[len(found)] = [*ids[1:], close]
            case SyncRun(token):
                found[MAIN].append(token)
            case _:
                found[MAIN] += segment.ids
    found[MAIN].append(answer.end)
    return found
