"""Schedulers over scripted engines, and requests for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.engines.scripted import Script, ScriptedEngine, shuffled
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.policy import SchedulingPolicy
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SCHEME, SYNC
from tests.runtime.play import ID, SIZE, VOCABULARY

A, B, C, SPACE_A = (ID[text] for text in ("a", "b", "c", " a"))
# Promises would be rare otherwise, and answers short.
LEANING_V = np.zeros(SIZE, dtype=np.float32)
LEANING_V[[OPEN, CLOSE, SYNC, P20]] = 1.5
LEANING_V[END] = -1
RULES = Rules(max_tokens=40, max_threads=4, max_topic_tokens=3, min_chunk_tokens=6)
LINES = [(A, OPEN, B, P20), (B, ASYNC), (P20, ASYNC, C, A, CLOSE), (P20, SPACE_A, SYNC, C, END)]
"""Main: a, a promise on b, ' a', sync, c. The chunk writes c a."""


def leaning(seed: int) -> Script:
    plain = shuffled(SIZE, seed)

    def script(seen: tuple[int, ...]) -> FloatArray:
        return plain(seen) + LEANING_V

    return script


class FakeClock:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def machine(
    script: Script,
    *,
    max_positions: int = 4096,
    clock: Callable[[], float] = time.perf_counter,
    policy: SchedulingPolicy | None = None,
) -> tuple[ScriptedEngine, Scheduler]:
    engine = ScriptedEngine(script, SIZE, max_positions)
    return engine, Scheduler(engine, VOCABULARY, SCHEME, clock=clock, policy=policy)


def request(prompt: Sequence[int] = (A, B), *, number: int = 0, seed: int = 0) -> Request:
    sampler = Sampler(SamplingParams(temperature=1, seed=seed), request=number)
    return Request(tuple(prompt), sampler, RULES)


def greedy(*, max_seconds: float | None = None) -> Request:
    return Request((C, C, A), Sampler(SamplingParams()), RULES, max_seconds)


def finish(scheduler: Scheduler, numbers: Iterable[int]) -> list[Answer]:
    """Step until everything is answered; return the answers to `numbers`, and forget them."""
    while scheduler.busy:
        scheduler.step()
    answers = []
    for number in numbers:
        answer = scheduler.result(number)
        assert answer is not None
        answers.append(answer)
        scheduler.forget(number)
    return answers
