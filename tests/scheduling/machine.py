"""Schedulers over scripted engines, and requests for them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.events import Event
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Logits, RowParams, SampledToken, Sampler, sample_token
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.answer.text import AnswerText
from pasta_decoding.engines.base import FloatArray
from pasta_decoding.scheduling.generation import Generation
from pasta_decoding.scheduling.policy import SchedulingPolicy
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import ID, SIZE, VOCABULARY
from tests.law.world import ASYNC, CLOSE, END, FIRST_WORD, OPEN, P20, SCHEME, SYNC
from tests.scripted import Script, ScriptedEngine, follow, shuffled

A, B, C, SPACE_A = (ID[text] for text in ("a", "b", "c", " a"))
# Promises would be rare otherwise, and answers short.
LEANING_V = np.zeros(SIZE, dtype=np.float32)
LEANING_V[[OPEN, CLOSE, SYNC, P20]] = 1.5
LEANING_V[END] = -1
RULES = Rules(max_tokens=40, max_threads=4, max_topic_tokens=3, min_chunk_tokens=6)
LINES = [(A, OPEN, B, P20), (B, ASYNC), (P20, ASYNC, C, A, CLOSE), (P20, SPACE_A, SYNC, C, END)]
"""Main: a, a promise on b, ' a', sync, c. The chunk writes c a."""
ENDLESS = follow((A, B), (B, A), vocabulary_size=SIZE)
PROMPT_TOKENS = (1, 2, 3, 5, 9, 14)


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
    clock: Callable[[], float] = time.perf_counter,
    policy: SchedulingPolicy | None = None,
    **limits: int,
) -> tuple[ScriptedEngine, Scheduler]:
    engine = ScriptedEngine(script, SIZE, **limits)
    return engine, Scheduler(
        engine, VOCABULARY, SCHEME, clock=clock, policy=policy or SchedulingPolicy()
    )


def request(prompt: Sequence[int] = (A, B), *, number: int = 0, seed: int = 0) -> Request:
    sampler = Sampler(SamplingParams(temperature=1, seed=seed), request=number)
    return Request(tuple(prompt), sampler, RULES)


def greedy(**limits: Any) -> Request:
    return Request((C, C, A), Sampler(SamplingParams()), replace(RULES, **limits))


def finish(scheduler: Scheduler, added: Iterable[Generation]) -> list[Answer]:
    """Step until everything is answered; return the answers to `added`."""
    while scheduler.busy:
        scheduler.step()
    answers = [generation.result() for generation in added]
    assert None not in answers
    return [answer for answer in answers if answer is not None]


class Leaning(Sampler):
    """A sampler for a random model, which would seldom promise by itself."""

    def accept(
        self, row: RowParams, _wanted: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        logits_V = logits() + 2 * LEANING_V
        return super().accept(row, sample_token(logits_V, row), lambda: logits_V, allowed)


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    return tuple(Random(number).choices(range(FIRST_WORD, SIZE), k=tokens))


def numbered_request(number: int, **limits: Any) -> Request:
    """One of many requests: prompts of all lengths, every second one greedy."""
    prompt = prompt_of(number, PROMPT_TOKENS[number % len(PROMPT_TOKENS)])
    sampler = Leaning(SamplingParams(temperature=number % 2), request=number)
    return Request(prompt, sampler, replace(RULES, **limits))


def assert_same(ours: Answer, theirs: Answer) -> None:
    """Equal in all that does not say when a thread wrote, or what it wrote in vain."""
    assert ours.segments == theirs.segments
    assert ours.layouts == theirs.layouts
    assert ours.text == theirs.text == ordered(ours.events)
    for what in ("interventions", "truncated", "hit_limit", "stopped", "fed_tokens"):
        assert getattr(ours, what) == getattr(theirs, what)
    # A stop string may end an answer before or after a thread's last token was fed, for nobody.
    if not (ours.stopped or ours.trimmed_tokens or theirs.trimmed_tokens):
        assert fed_by(ours) == fed_by(theirs)


def fed_by(answer: Answer) -> list[tuple[int, int, int]]:
    return sorted((fed.thread, fed.position, fed.token) for fed in answer.trace.fed)


def ordered(events: Iterable[Event]) -> str:
    """The text of an answer, a fold of its events."""
    return "".join(map(AnswerText().feed, events))
