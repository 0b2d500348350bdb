"""Requests whose prompts begin alike: the beginning is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.engines.scripted import ScriptedEngine, follow, shuffled
from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.admission import ResourceRequest, resources_together, shared_prefix_len
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.local import answer_of
from pasta_decoding.runtime.prefix_cache import PrefillBudget
from pasta_decoding.runtime.request import Request, Rules
from pasta_decoding.runtime.scheduler import Scheduler
from tests.examples import few
from tests.law.world import SCHEME
from tests.runtime.machine import LINES, A, B, C, FakeClock, finish, greedy, machine, request
from tests.runtime.play import SIZE, VOCABULARY
from tests.runtime.test_batching import Make, asked, assert_same, llama, prompt_of, run, scripted
from tests.runtime.test_scheduler import breaking

MEMBERS = 3
ENDLESS = follow((A, B), (B, A), vocabulary_size=SIZE)


def kin(number: int, member: int) -> Request:
    """One of three requests whose prompts share the first 0, 3 or 6 tokens."""
    prompt = prompt_of(number, 3 * (number % 3)) + prompt_of(50 + member, 1 + member)
    return replace(asked(MEMBERS * number + member, max_tokens=14), prompt=prompt)


@cache
def alone(make: Make, number: int, member: int) -> Answer:
    return answer_of(make()[1], kin(number, member))


def prompted(*prompts: Sequence[int]) -> list[Request]:
    return [replace(greedy(), prompt=tuple(prompt)) for prompt in prompts]


DEED = st.tuples(
    st.sampled_from(["add", "together", "together", "step", "step", "cancel"]), st.integers(0, 9)
)


@pytest.mark.parametrize("make", [scripted, llama])
@few(15)
@given(deeds=st.lists(DEED, min_size=4, max_size=16))
def test_answers_are_those_that_each_request_gets_alone_whoever_comes_and_goes(
    make: Make, deeds: list[tuple[str, int]]
) -> None:
    engine, scheduler = make()

    def one(number: int) -> dict[int, tuple[int, int]]:
        return {scheduler.add(kin(number, 0)): (number, 0)}

    def together(number: int) -> dict[int, tuple[int, int]]:
        names = [(number, member) for member in range(MEMBERS)]
        return dict(zip(scheduler.add_together([kin(*name) for name in names]), names, strict=True))

    added = run(scheduler, deeds, {"add": one, "together": together})
    for name, answer in zip(added.values(), finish(scheduler, added), strict=True):
        assert_same(answer, alone(make, *name))
    assert engine.slots_in_use == 0


def test_what_prompts_begin_with_alike_is_fed_once() -> None:
    engine, scheduler = machine(shuffled(SIZE))
    three = prompted((A, B, C, A), (A, B, C, B, B), (A, B, C, C, C, C))
    answers = finish(scheduler, scheduler.add_together(three))
    prefills = [[len(feed.ids) for feed in step] for step in engine.steps[:3]]
    assert prefills == [[3], [1, 2, 3], [1, 1, 1]]
    assert [answer.trace.prefilled_tokens for answer in answers] == [4, 2, 3]
    assert [answer.trace.prompt_tokens for answer in answers] == [4, 5, 6]


@pytest.mark.parametrize("cancelled", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_whoever_is_cancelled_at_any_time_the_others_are_answered(
    cancelled: int, steps: int
) -> None:
    engine = ScriptedEngine(shuffled(SIZE), SIZE)
    scheduler = Scheduler(engine, VOCABULARY, SCHEME, prefill_budget=PrefillBudget(4))
    numbers = scheduler.add_together([kin(2, member) for member in range(MEMBERS)])
    for _ in range(steps):
        scheduler.step()
    scheduler.forget(numbers.pop(cancelled))
    others = [member for member in range(MEMBERS) if member != cancelled]
    for member, answer in zip(others, finish(scheduler, numbers), strict=True):
        assert_same(answer, alone(scripted, 2, member))
    assert engine.slots_in_use == 0


def test_a_prompt_keeps_a_token_of_its_own_even_if_all_are_equal() -> None:
    assert shared_prefix_len(prompted((A, B), (A, B))) == 1
    assert shared_prefix_len(prompted((A, B, C), (A, B))) == 1
    assert shared_prefix_len(prompted((A, B, C), (B, B, C))) == 0
    assert shared_prefix_len(prompted((A, B, C))) == 0


def test_the_shared_beginning_is_a_demand_of_the_first_only() -> None:
    rules = Rules(max_tokens=5, parallel=False)
    three = [replace(one, rules=rules) for one in prompted((A, B, C), (A, B, B, B), (A, B, A))]
    assert resources_together(three) == [
        ResourceRequest(8, 1),
        ResourceRequest(7, 1),
        ResourceRequest(6, 1),
    ]


def test_requests_that_never_fit_together_are_refused_and_nothing_is_held() -> None:
    rules = Rules(max_tokens=20, parallel=False)
    three = [replace(one, rules=rules) for one in prompted((A, B, C), (A, B, B), (A, B, A))]
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=64)
    scheduler = Scheduler(engine, VOCABULARY, SCHEME)
    with pytest.raises(PastaError, match=r"up to 65 tokens together, .* the engine's 64 cells"):
        scheduler.add_together(three)
    assert not scheduler.busy
    wide = ScriptedEngine(ENDLESS, SIZE, max_branches=2)
    with pytest.raises(PastaError, match="up to 3 branches does not fit the engine's 2"):
        Scheduler(wide, VOCABULARY, SCHEME).add_together(three)
    assert finish(scheduler, scheduler.add_together(three[:2]))
    assert engine.slots_in_use == 0


def test_an_error_of_the_engine_ends_all_whose_cells_are_the_same_and_nobody_else() -> None:
    """Only the second one's own tokens break the pass; who has ended by then has its answer."""
    engine = ScriptedEngine(lambda seen: breaking(seen[2:]), SIZE)
    scheduler = Scheduler(engine, VOCABULARY, SCHEME, prefill_budget=PrefillBudget(2))
    beside = scheduler.add(greedy())
    while scheduler.result(beside) is None:
        scheduler.step()
    together = scheduler.add_together(prompted((C, C, C, A), (C, C, B, A, A, A)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        finish(scheduler, together)
    for number in together:
        with pytest.raises(RuntimeError, match="the device is gone"):
            scheduler.result(number)
    assert finish(scheduler, [beside])
    assert engine.slots_in_use == 0


def test_time_runs_out_for_all_and_each_keeps_what_it_has() -> None:
    engine, scheduler = machine(ENDLESS, clock=FakeClock())
    two = [replace(one, max_seconds=15) for one in prompted((C, A, A), (C, A, B))]
    answers = finish(scheduler, scheduler.add_together(two))
    assert all(answer.truncated and 0 < answer.fed_tokens < 15 for answer in answers)
    assert engine.slots_in_use == 0


def test_events_and_the_first_token_have_their_seconds() -> None:
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE), clock=FakeClock())
    [answer] = finish(scheduler, [scheduler.add(greedy())])
    assert len(answer.event_s) == len(answer.events)
    assert list(answer.event_s) == sorted(answer.event_s)
    assert answer.first_token_s is not None
    assert 0 < answer.first_token_s <= answer.event_s[0]
    assert answer.event_s[-1] <= answer.seconds


def test_an_answer_cancelled_in_the_queue_has_no_first_token() -> None:
    _, scheduler = machine(shuffled(SIZE))
    number = scheduler.add(request())
    scheduler.cancel(number)
    answer = scheduler.result(number)
    assert answer is not None
    assert answer.first_token_s is None
