"""Nobody starves and nothing leaks, whatever the others ask for and whenever they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.runtime.generation import Generation
from pasta_decoding.runtime.policy import ENOUGH, SchedulingPolicy
from pasta_decoding.runtime.request import Priority, Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from tests.law.whim import EveryThread, Whim
from tests.law.world import ASYNC, OPEN, P20, SCHEME
from tests.runtime.machine import A, B, C, FakeClock, asked, greedy
from tests.runtime.play import SIZE, VOCABULARY
from tests.scripted import ScriptedEngine, follow, shuffled

# Promises without end, of which no two may begin alike, and chunks that never close.
GREEDY_ONE = follow(
    (A, OPEN), (P20, OPEN), (OPEN, B), (B, P20), (ASYNC, C), (C, C), vocabulary_size=SIZE
)
PLAIN = follow((B, A), (A, B), vocabulary_size=SIZE)
PROMISES = Rules(max_tokens=4000, max_chunks=2000, max_threads=1000, topic=False)


def both(seen: tuple[int, ...]) -> FloatArray:
    return GREEDY_ONE(seen) if seen[0] == C else PLAIN(seen)


def adversary(priority: Priority = Priority.normal) -> Request:
    """Thousands of promises and a huge budget."""
    return Request((C, A), Sampler(SamplingParams()), PROMISES, priority)


def victim(tokens: int, priority: Priority = Priority.normal) -> Request:
    return replace(greedy(), prompt=(B,), rules=Rules(max_tokens=tokens), priority=priority)


def steps_of_a_victim(request: Request, adversaries: int, **about: Priority) -> int:
    engine = ScriptedEngine(both, SIZE, max_positions=8192)
    clock = FakeClock()
    scheduler = Scheduler(engine, VOCABULARY, SCHEME, policy=SchedulingPolicy(), clock=clock)
    for _ in range(adversaries):
        scheduler.add(adversary(**about))
    for _ in range(25):
        scheduler.step()
    one, steps = scheduler.add(request), 0
    while one.result() is None:
        scheduler.step()
        steps += 1
    assert scheduler.activity.live_threads >= 10 * adversaries
    scheduler.close()
    assert engine.slots_in_use == 0
    return steps


@pytest.mark.parametrize("adversaries", [1, 4])
def test_whoever_promises_thousands_of_chunks_delays_nobody_else(adversaries: int) -> None:
    """But for the steps in which it is learned what so many threads take without prompts."""
    most = steps_of_a_victim(victim(20), 0) + ENOUGH
    assert steps_of_a_victim(victim(20), adversaries) <= most
    assert steps_of_a_victim(victim(20), adversaries, priority=Priority.high) <= most


def test_an_answer_that_is_in_no_hurry_waits_no_longer_than_it_must() -> None:
    alone = steps_of_a_victim(victim(20), 0)
    assert alone < steps_of_a_victim(victim(20, Priority.low), 4) <= 4 * alone


def deeds(seed: int, policy: SchedulingPolicy) -> None:
    """Add, step, cancel, run out of time and forget, at random; then everything is free."""
    chance = Random(seed)
    engine = ScriptedEngine(shuffled(SIZE, seed), SIZE, max_slots=300, max_branches=30)
    clock = FakeClock()
    scheduler = Scheduler(engine, VOCABULARY, SCHEME, policy=policy, clock=clock)
    known: list[Generation] = []
    for _ in range(chance.randrange(4, 12)):
        limit = chance.choice([None, None, float(chance.randrange(5, 60))])
        stops = chance.choice([(), ("b",)])
        request = asked(chance.randrange(30), max_seconds=limit, stop=stops)
        known.append(scheduler.add(request))
        for _ in range(chance.randrange(8)):
            scheduler.step()
        if chance.random() < 0.4:
            scheduler.cancel(chance.choice(known))
        if chance.random() < 0.2:
            scheduler.cancel(known.pop(chance.randrange(len(known))))
    while scheduler.busy:
        scheduler.step()
    assert all(one.result() is not None for one in known)
    assert engine.slots_in_use == 0


POLICIES: dict[str, Callable[[int], SchedulingPolicy]] = {
    "whim": Whim,
    "eager": lambda _seed: EveryThread(),
    "cheapest": lambda _seed: SchedulingPolicy(),
}


@pytest.mark.parametrize(
    "seeds",
    [range(10), pytest.param(range(10, 150), marks=pytest.mark.slow)],
    ids=["ten", "many"],
)
@pytest.mark.parametrize("name", POLICIES)
def test_random_schedules_with_cancels_and_time_outs_leave_nothing_behind(
    name: str, seeds: range
) -> None:
    for seed in seeds:
        deeds(seed, POLICIES[name](seed))
