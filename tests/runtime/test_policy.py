"""The policy's policy: what a step's width is bought with, and that everybody has a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.runtime.policy import BACKGROUND_STEPS, Runnable, SchedulingPolicy, StepCost
from pasta_decoding.runtime.request import Priority

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


def widths(policy: SchedulingPolicy, answers: Sequence[Runnable]) -> list[int]:
    return [len(threads) for threads in policy.choose(answers)]


def standing(*threads: int) -> list[Runnable]:
    return [Runnable(range(count)) for count in threads]


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
    random, policy, whole = Random(0), SchedulingPolicy(), 0
    for step in range(600):
        answers = standing(*(random.randint(1, 6) for _ in range(160)))
        width, wide = sum(widths(policy, answers)), sum(len(one.threads) for one in answers)
        whole += width == wide
        if step % 3:
            policy.learn(width, 0.015 + 0.00002 * width)
    assert whole > 550


def test_a_figure_that_is_old_is_taken_again() -> None:
    costs = StepCost(stale_steps=20)
    for width in (1, 2):
        for _ in range(3):
            costs.add(width, 1.0)
    assert costs.unsure([1, 2]) is None
    for _ in range(18):
        costs.add(2, 1.0)
    assert costs.unsure([1, 2]) == 1


def test_who_is_in_a_hurry_has_all_threads_and_who_is_not_waits_a_little() -> None:
    policy = taught(linear)
    answers = [
        Runnable(range(4), priority=Priority.low),
        Runnable(range(4)),
        Runnable(range(4), priority=Priority.high),
    ]
    found = [widths(policy, answers) for _ in range(BACKGROUND_STEPS)]
    assert [one[1:] for one in found] == [[1, 4]] * BACKGROUND_STEPS
    assert [one[0] for one in found] == [0, 0, 0, 1]
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
    asking = [Runnable(range(threads), priority=priority) for threads, priority in answers]
    advanced = [0] * len(asking)
    for _ in range(BACKGROUND_STEPS):
        chosen = policy.choose(asking)
        for place, (one, threads) in enumerate(zip(asking, chosen, strict=True)):
            assert list(threads) == list(one.threads[: len(threads)])
            advanced[place] += bool(threads)
            assert threads or one.priority is Priority.low or not one.threads
        width = sum(map(len, chosen))
        if width:
            policy.learn(width, cost(width))
    assert all(advanced[n] for n, one in enumerate(asking) if one.threads)
