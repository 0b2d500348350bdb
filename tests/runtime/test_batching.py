"""Continuous batching: whoever comes and goes, an answer is the one that its request gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.scripted import ScriptedEngine, follow, shuffled
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.decoder import answer_of
from pasta_decoding.runtime.events import Synced
from pasta_decoding.runtime.prefix_cache import PrefillBudget
from pasta_decoding.runtime.request import Request, SamplingParams
from pasta_decoding.runtime.sampler import Choice, Logits, Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from pasta_decoding.runtime.text import ordered
from tests.examples import few
from tests.law.whim import EveryThread
from tests.law.world import ASYNC, CLOSE, END, FIRST_WORD, OPEN, P20, SCHEME, SYNC
from tests.runtime.machine import (
    LEANING_V,
    LINES,
    RULES,
    A,
    B,
    C,
    finish,
    greedy,
    machine,
)
from tests.runtime.play import SIZE, VOCABULARY
from tests.tiny import tiny_llama

Make = Callable[[], tuple[Engine, Scheduler]]
LLAMA = tiny_llama(vocabulary=SIZE)
PREFILL_TOKENS = 4
PROMPT_TOKENS = (1, 2, 3, 5, 9, 14)


def scripted() -> tuple[Engine, Scheduler]:
    """Room for about four requests at a time; the others queue."""
    engine = ScriptedEngine(shuffled(SIZE), SIZE, max_slots=200, max_branches=20)
    return engine, Scheduler(
        engine, VOCABULARY, SCHEME, prefill_budget=PrefillBudget(PREFILL_TOKENS)
    )


def llama() -> tuple[Engine, Scheduler]:
    """Room for three or four."""
    engine = TorchEngine(LLAMA)
    return engine, Scheduler(
        engine, VOCABULARY, SCHEME, prefill_budget=PrefillBudget(PREFILL_TOKENS)
    )


@dataclass(frozen=True)
class Leaning:
    """A sampler for a random model, which would seldom promise by itself."""

    sampler: Sampler

    def sample(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        return self.sampler.sample(thread, index, logits_V + 2 * LEANING_V, allowed)


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    return tuple(Random(number).choices(range(FIRST_WORD, SIZE), k=tokens))


def asked(number: int, *, max_tokens: int = RULES.max_tokens) -> Request:
    """One of many requests: prompts of all lengths, every second one greedy."""
    prompt = prompt_of(number, PROMPT_TOKENS[number % len(PROMPT_TOKENS)])
    sampler = Sampler(SamplingParams(temperature=number % 2), request=number)
    return Request(prompt, Leaning(sampler), replace(RULES, max_tokens=max_tokens))


@cache
def alone(make: Make, number: int, max_tokens: int = RULES.max_tokens) -> Answer:
    return answer_of(make()[1], asked(number, max_tokens=max_tokens))


def assert_same(ours: Answer, theirs: Answer) -> None:
    """Equal in all that does not say when a thread wrote, or what it wrote in vain."""
    assert ours.segments == theirs.segments
    assert ours.layouts == theirs.layouts
    assert ours.text == theirs.text == "".join(ordered(ours.events))
    for what in ("interventions", "truncated", "hit_limit", "stopped", "fed_tokens"):
        assert getattr(ours, what) == getattr(theirs, what)
    # A stop string may end an answer before or after a thread's last token was fed, for nobody.
    if not (ours.stopped or ours.trimmed_tokens or theirs.trimmed_tokens):
        assert fed_by(ours) == fed_by(theirs)


def fed_by(answer: Answer) -> list[tuple[int, int, int]]:
    return sorted((fed.thread, fed.position, fed.token) for fed in answer.trace.fed)


# Company

DEED = st.tuples(st.sampled_from(["add", "add", "step", "step", "cancel"]), st.integers(0, 9))


@pytest.mark.parametrize("make", [scripted, llama])
@few(6)
@given(deeds=st.lists(DEED, min_size=4, max_size=20))
def test_an_answer_does_not_depend_on_who_comes_and_goes(
    make: Make, deeds: list[tuple[str, int]]
) -> None:
    engine, scheduler = make()
    added: dict[int, int] = {}
    for deed, number in deeds:
        if deed == "add":
            added[scheduler.add(asked(number))] = number
        elif deed == "step":
            for _ in range(number):
                scheduler.step()
        elif added:
            cancelled = list(added)[number % len(added)]
            scheduler.cancel(cancelled)
            del added[cancelled]
    for number, answer in zip(added.values(), finish(scheduler, added), strict=True):
        assert_same(answer, alone(make, number))
    assert engine.slots_in_use == 0


# Forward passes


def test_requests_share_the_forward_pass() -> None:
    engine, scheduler = machine(follow(*LINES, vocabulary_size=SIZE), policy=EveryThread())
    answers = finish(scheduler, [scheduler.add(greedy()) for _ in range(3)])
    prefill = 1
    assert len(engine.steps) == prefill + answers[0].critical_path


def test_finished_chunks_share_a_branch_until_they_are_joined() -> None:
    """Three chunks one after the other, then a sync, with branches for two threads and one more."""
    promises = [(OPEN, B, P20, A, A, A), (OPEN, C, P20, B, B, B), (OPEN, A, P20, C, C, C)]
    main = (A, *promises[0], *promises[1], *promises[2], SYNC, END)
    script = follow(main, (ASYNC, C, CLOSE), vocabulary_size=SIZE)
    engine = ScriptedEngine(script, SIZE, max_branches=3)
    one = replace(greedy(), rules=replace(RULES, max_threads=2))
    answer = answer_of(Scheduler(engine, VOCABULARY, SCHEME), one)
    assert answer.text == "caaacbbbcccc"
    assert [event for event in answer.events if isinstance(event, Synced)] == [Synced((1, 2, 3))]
