"""A long prompt starves nobody: how much of it a step takes follows from what steps take.

Seconds are those of a machine on paper: the clock moves by what a pass of a scripted engine costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.lang.layout import Joining
from pasta_decoding.scheduling.generation import Generation
from pasta_decoding.scheduling.policy import (
    MIN_PROMPT_TOKENS,
    MIN_SAMPLES,
    WIDTH_GRID,
    SchedulingPolicy,
    share_out,
)
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.examples import few
from tests.law.world import SCHEME
from tests.scheduling.machine import ENDLESS, A, finish, greedy, leaning, request
from tests.scripted import Script, ScriptedEngine

LONG = 2000
TOKENS = 64


@dataclass(frozen=True)
class Machine:
    """What a pass takes: reading the weights, each token, and each cell that a token looks at."""

    weights_s: float
    token_s: float
    cell_s: float

    def seconds(self, feeds: Sequence[Feed]) -> float:
        looks = sum(sum(feed.positions) for feed in feeds)
        tokens = sum(len(feed.ids) for feed in feeds)
        return self.weights_s + self.token_s * tokens + self.cell_s * looks


MACHINES = {
    "llama.cpp on a CPU": Machine(0.017, 0.005, 1e-6),
    "slow attention": Machine(0.040, 0.005, 1e-5),
    "a GPU": Machine(0.006, 0.00001, 1e-10),
}


class TimedEngine(ScriptedEngine):
    """A scripted engine whose passes move its clock."""

    def __init__(self, machine: Machine, script: Script = ENDLESS) -> None:
        super().__init__(script, SIZE, max_positions=4096)
        self.machine, self.now_s = machine, 0.0

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        self.now_s += self.machine.seconds(feeds)
        return super().step(feeds)

    def clock(self) -> float:
        return self.now_s


def scheduler_over(engine: TimedEngine, **options: Any) -> Scheduler:
    return Scheduler(engine, VOCABULARY, SCHEME, clock=engine.clock, **options)


def writing(tokens: int, prompt_tokens: int = 3) -> Request:
    rules = Rules(max_tokens=tokens, parallel=False)
    return replace(greedy(), prompt=(A,) * prompt_tokens, rules=rules)


def passes(engine: TimedEngine, scheduler: Scheduler, generation: Generation) -> list[float]:
    """Step until `generation` has its answer; return when each of its tokens came."""
    came: list[float] = []
    while generation.result() is None:
        scheduler.step()
        if generation.drain():
            came.append(engine.now_s)
    return came


def prompt_s(machine: Machine, streams: int = 0) -> float:
    """Seconds from asking to the first token, with a prompt of LONG tokens."""
    engine = TimedEngine(machine)
    scheduler = scheduler_over(engine)
    for _ in range(streams):
        scheduler.add(writing(3000))
    for _ in range(20):
        scheduler.step()
    generation = scheduler.add(writing(1, LONG))
    passes(engine, scheduler, generation)
    answer = generation.result()
    assert answer is not None
    assert answer.first_token_s is not None
    return answer.first_token_s


def stream(machine: Machine, long: int) -> list[float]:
    """When the tokens of a short answer came, beside some long prompts."""
    engine = TimedEngine(machine)
    scheduler = scheduler_over(engine)
    generation = scheduler.add(writing(TOKENS))
    for _ in range(10):
        scheduler.step()
    for _ in range(long):
        scheduler.add(writing(10, LONG))
    return passes(engine, scheduler, generation)


@pytest.mark.parametrize("name", MACHINES)
def test_a_stream_beside_a_long_prompt_is_at_most_three_times_as_slow(name: str) -> None:
    alone, with_prompt = stream(MACHINES[name], 0), stream(MACHINES[name], 1)
    assert len(with_prompt) == len(alone)
    assert with_prompt[-1] - with_prompt[0] <= 3 * (alone[-1] - alone[0])
    assert max(b - a for a, b in pairwise(with_prompt)) <= 8 * max(
        b - a for a, b in pairwise(alone)
    )


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("streams", [1, 8])
def test_a_long_prompt_beside_streams_takes_at_most_as_long_again(name: str, streams: int) -> None:
    assert prompt_s(MACHINES[name], streams) <= 2 * prompt_s(MACHINES[name])


def test_one_pass_that_took_for_ever_does_not_stop_prompts_for_ever() -> None:
    policy = SchedulingPolicy()
    for _ in range(3):
        policy.learn(1, 0.02)
    assert policy.prompt_tokens(1, 256)
    policy.learn(1, 60.0, 4)
    fed = 0
    for _ in range(100):
        tokens = policy.prompt_tokens(1, 256)
        fed += tokens
        policy.learn(1, 0.02 + 0.001 * tokens, tokens)
    assert fed > 400


def test_prompts_are_fed_although_each_step_has_a_width_of_which_nothing_is_known() -> None:
    policy, fed = SchedulingPolicy(), 0
    for width in WIDTH_GRID:
        tokens = policy.prompt_tokens(width, 4096)
        fed += tokens
        policy.learn(width, 0.02, tokens)
    assert fed == MIN_PROMPT_TOKENS


def test_steps_without_prompts_pay_for_a_slow_pass() -> None:
    scheduler = scheduler_over(TimedEngine(MACHINES["a GPU"]))
    scheduler.add(writing(100))
    for step in range(20):
        scheduler.step()
        if step == MIN_SAMPLES:
            scheduler.policy.learn(1, 60.0, 4)
    assert scheduler.policy._budget_s > 0


@pytest.mark.parametrize(("width", "min_tokens"), [(250, 1000), (2000, 64)])
def test_prompts_are_fed_beside_hundreds_of_threads_where_wide_steps_are_cheap(
    width: int, min_tokens: int
) -> None:
    policy, tokens = SchedulingPolicy(), 0
    for _ in range(30):
        tokens = policy.prompt_tokens(width, 1536)
        policy.learn(width, 0.02 + 0.00001 * (width + tokens), tokens)
    assert tokens >= min_tokens


def test_what_a_text_join_reads_again_is_paced_like_a_prompt() -> None:
    """Beside others, so that nobody's step is longer than the pace allows."""
    engine = TimedEngine(MACHINES["slow attention"], leaning(7))
    engine.batch_tokens = 5
    scheduler = scheduler_over(engine, joining=Joining.text)
    added = [scheduler.add(request(seed=seed)) for seed in range(6)]
    answers = finish(scheduler, added)
    assert any(answer.trace.rewritten_tokens > 5 for answer in answers)
    wide = [feeds for feeds in engine.steps if any(len(feed.ids) > 1 for feed in feeds)]
    assert all(sum(len(feed.ids) for feed in feeds if len(feed.ids) > 1) <= 5 for feeds in wide)


@few(50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 256))
def test_shares_of_a_step(unfed_tokens: list[int], tokens: int) -> None:
    shares = share_out(unfed_tokens, tokens)
    assert sum(shares) == min(tokens, sum(unfed_tokens))
    assert all(0 <= share <= unfed for share, unfed in zip(shares, unfed_tokens, strict=True))
    assert shares[0] >= min(unfed_tokens[0], -(-tokens // 2))
    for share, unfed in zip(shares[1:], unfed_tokens[1:], strict=True):
        shorter = [index for index in range(len(unfed_tokens)) if unfed_tokens[index] < unfed]
        assert not share or all(shares[index] == unfed_tokens[index] for index in shorter)
