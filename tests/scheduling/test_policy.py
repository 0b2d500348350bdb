"""The policy: what a step's width is bought with; nobody starves and nothing leaks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Priority, Rules, SamplingParams
from pasta_decoding.engines.base import FloatArray
from pasta_decoding.scheduling.generation import Generation
from pasta_decoding.scheduling.policy import (
    BACKGROUND_STEPS,
    MIN_SAMPLES,
    STALE_STEPS,
    RunnableThreads,
    SchedulingPolicy,
    StepCost,
)
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.law.whim import EveryThread, Whim
from tests.law.world import ASYNC, OPEN, P20, SCHEME
from tests.scheduling.machine import A, B, C, FakeClock, greedy, numbered_request
from tests.scripted import ScriptedEngine, follow, shuffled

Cost = Callable[[int], float]


def flat(_width: int) -> float:
    """Width costs nothing, as on a large GPU."""
    return 0.030


def linear(width: int) -> float:
    """Width saves nothing."""
    return 0.010 * width


def stepped(width: int) -> float:
    """Up to eight rows cost what one costs, then twice that, and so on."""
    return 0.010 * (1 + (width - 1) // 8)


def taught(cost: Cost, target_s: float | None = None) -> SchedulingPolicy:
    policy = SchedulingPolicy(target_s)
    for width in (*range(1, 17), 24, 32, 48, 64):
        for _ in range(3):
            policy.learn(width, cost(width))
    return policy


def widths(policy: SchedulingPolicy, answers: Sequence[RunnableThreads]) -> list[int]:
    return [len(threads) for threads in policy.choose(answers)]


def standing(*threads: int) -> list[RunnableThreads]:
    return [RunnableThreads(range(count)) for count in threads]


@pytest.mark.parametrize(
    ("cost", "target_s", "threads", "expected"),
    [
        *((cost, None, [7], [7]) for cost in (flat, linear, stepped)),  # alone: all its threads
        (flat, None, [5, 3, 1, 4], [5, 3, 1, 4]),
        (linear, None, [5, 3, 1, 4], [1, 1, 1, 1]),
        (stepped, None, [5, 3, 1, 4], [3, 2, 1, 2]),
        (linear, 0.035, [8], [3]),
        (stepped, 0.015, [9, 9], [4, 4]),
        (linear, 0.001, [3] * 16, [1] * 16),  # each advances, whatever the goal
    ],
)
def test_a_step_is_as_wide_as_makes_a_token_cheapest_and_as_narrow_as_its_goal(
    cost: Cost, target_s: float | None, threads: list[int], expected: list[int]
) -> None:
    assert widths(taught(cost, target_s), standing(*threads)) == expected


def test_widths_of_which_nothing_is_known_are_tried_and_then_left_alone() -> None:
    policy = SchedulingPolicy()
    seen = []
    for _ in range(60):
        width = sum(widths(policy, standing(4, 4)))
        policy.learn(width, linear(width))
        seen.append(width)
    assert set(seen) == {2, 3, 4, 6, 8}
    assert seen[-40:] == [2] * 40


def test_with_hundreds_of_threads_nearly_all_steps_are_as_wide_as_they_can_be() -> None:
    """On a GPU: however their numbers change, and although steps with prompts tell nothing."""
    random = Random(0)
    policy = SchedulingPolicy()
    full_steps = 0
    for step in range(600):
        answers = standing(*(random.randint(1, 6) for _ in range(160)))
        width = sum(widths(policy, answers))
        max_width = sum(len(answer.threads) for answer in answers)
        full_steps += width == max_width
        if step % 3:
            policy.learn(width, 0.015 + 0.00002 * width)
    assert full_steps > 550


def test_a_figure_that_is_old_is_taken_again() -> None:
    costs = StepCost()
    for width in (1, 2):
        for _ in range(3):
            costs.add(width, 1.0)
    assert costs.width_to_measure([1, 2]) is None
    for _ in range(STALE_STEPS - 2):
        costs.add(2, 1.0)
    assert costs.width_to_measure([1, 2]) == 1


def test_who_is_in_a_hurry_has_all_threads_and_who_is_not_waits_a_little() -> None:
    policy = taught(linear)
    answers = [
        RunnableThreads(range(4), priority=Priority.low),
        RunnableThreads(range(4)),
        RunnableThreads(range(4), priority=Priority.high),
    ]
    steps = [widths(policy, answers) for _ in range(BACKGROUND_STEPS)]
    assert [step_widths[1:] for step_widths in steps] == [[1, 4]] * BACKGROUND_STEPS
    assert [step_widths[0] for step_widths in steps] == [0, 0, 0, 1]
    assert widths(taught(linear), answers[:1]) == [4], "alone it has nobody to wait for"


ANSWERS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(list(Priority))), min_size=1, max_size=30
)


@given(ANSWERS, st.sampled_from([flat, linear, stepped]), st.sampled_from([None, 0.001, 0.05]))
def test_everybody_who_is_ready_advances_within_a_few_steps(
    answers: list[tuple[int, Priority]], cost: Cost, target_s: float | None
) -> None:
    """However many threads the others have, and whatever their priority."""
    policy = SchedulingPolicy(target_s)
    runnable = [RunnableThreads(range(threads), priority=priority) for threads, priority in answers]
    advanced = [0] * len(runnable)
    for _ in range(BACKGROUND_STEPS):
        chosen = policy.choose(runnable)
        for index, (answer, threads) in enumerate(zip(runnable, chosen, strict=True)):
            assert list(threads) == list(answer.threads[: len(threads)])
            advanced[index] += bool(threads)
            assert threads or answer.priority is Priority.low or not answer.threads
        width = sum(map(len, chosen))
        if width:
            policy.learn(width, cost(width))
    assert all(advanced[index] for index, answer in enumerate(runnable) if answer.threads)


# Nobody starves and nothing leaks, whatever the others ask for and whenever they leave


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
    generation = scheduler.add(request)
    steps = 0
    while generation.result() is None:
        scheduler.step()
        steps += 1
    assert scheduler.activity.live_threads >= 10 * adversaries
    scheduler.close()
    assert engine.slots_in_use == 0
    return steps


@pytest.mark.parametrize("adversaries", [1, 4])
def test_whoever_promises_thousands_of_chunks_delays_nobody_else(adversaries: int) -> None:
    """But for the steps in which it is learned what so many threads take without prompts."""
    max_steps = steps_of_a_victim(victim(20), 0) + MIN_SAMPLES
    assert steps_of_a_victim(victim(20), adversaries) <= max_steps
    assert steps_of_a_victim(victim(20), adversaries, priority=Priority.high) <= max_steps


def test_an_answer_that_is_in_no_hurry_waits_no_longer_than_it_must() -> None:
    alone = steps_of_a_victim(victim(20), 0)
    assert alone < steps_of_a_victim(victim(20, Priority.low), 4) <= 4 * alone


def deeds(seed: int, policy: SchedulingPolicy) -> None:
    """Add, step, cancel, run out of time and forget, at random; then everything is free."""
    chance = Random(seed)
    engine = ScriptedEngine(shuffled(SIZE, seed), SIZE, max_slots=300, max_branches=30)
    clock = FakeClock()
    scheduler = Scheduler(engine, VOCABULARY, SCHEME, policy=policy, clock=clock)
    generations: list[Generation] = []
    for _ in range(chance.randrange(4, 12)):
        limit = chance.choice([None, None, float(chance.randrange(5, 60))])
        stops = chance.choice([(), ("b",)])
        request = numbered_request(chance.randrange(30), max_seconds=limit, stop=stops)
        generations.append(scheduler.add(request))
        for _ in range(chance.randrange(8)):
            scheduler.step()
        if chance.random() < 0.4:
            scheduler.cancel(chance.choice(generations))
        if chance.random() < 0.2:
            scheduler.cancel(generations.pop(chance.randrange(len(generations))))
    while scheduler.busy:
        scheduler.step()
    assert all(generation.result() is not None for generation in generations)
    assert engine.slots_in_use == 0


POLICIES: dict[str, Callable[[int], SchedulingPolicy]] = {
    "whim": Whim,
    "eager": lambda _seed: EveryThread(),
    "cheapest": lambda _seed: SchedulingPolicy(),
}


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 150), marks=pytest.mark.slow)], ids=["ten", "many"]
)
@pytest.mark.parametrize("name", POLICIES)
def test_random_schedules_with_cancels_and_time_outs_leave_nothing_behind(
    name: str, seeds: range
) -> None:
    for seed in seeds:
        deeds(seed, POLICIES[name](seed))
