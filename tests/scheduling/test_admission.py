"""Admission and the queue: who is let in when, who is refused, and how waiting can end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.events import Finished
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.scheduling.admission import (
    MIN_QUOTA,
    Quota,
    ResourceRequest,
    check_request,
    quota_of,
    resources_of,
)
from tests.answer.play import SIZE
from tests.examples import few
from tests.scheduling.machine import ENDLESS, A, FakeClock, finish, greedy, leaning, machine
from tests.scripted import ScriptedEngine


def sized(prompt_tokens: int, max_tokens: int, *, max_threads: int = 1) -> Request:
    """Ask for a sequential answer, or one of several threads."""
    rules = Rules(max_tokens=max_tokens, max_threads=max_threads, parallel=max_threads > 1)
    return replace(greedy(), prompt=(A,) * prompt_tokens, rules=rules)


def cells(count: int) -> Request:
    return sized(2, count - 2)


# Loads


def test_what_is_free_makes_answers_wider_and_lets_them_write_ahead() -> None:
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=115, max_branches=23)
    wide, taken = sized(5, 30, max_threads=9), ResourceRequest(35, 3)
    assert quota_of(wide, engine, taken) == Quota(ahead_tokens=10, threads=7)
    assert quota_of(wide, engine, ResourceRequest(115, 23)) == MIN_QUOTA
    assert quota_of(sized(5, 30), engine, taken) == MIN_QUOTA
    unlimited = ScriptedEngine(ENDLESS, SIZE)
    assert quota_of(wide, unlimited, taken) == Quota(ahead_tokens=30, threads=9)


def test_under_the_text_join_a_load_counts_what_is_fed_again() -> None:
    assert resources_of(sized(5, 30), joining=Joining.text) == ResourceRequest(slots=35, branches=1)
    parallel = sized(5, 30, max_threads=4)
    parallel = replace(parallel, rules=replace(parallel.rules, max_chunks=8))
    twice = resources_of(parallel, joining=Joining.text)
    assert twice == ResourceRequest(slots=5 + 30 + 30 + 8, branches=3)
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=70)
    with pytest.raises(PastaError, match=r"fed again by text joins \(73 in all\), do not fit"):
        check_request(parallel, engine, Joining.text)


# First come, first served


def first_fed(engine: ScriptedEngine) -> list[int]:
    """Prompt lengths in the order in which the requests were first fed."""
    feeds = [feed for step in engine.steps for feed in step]
    return [len(feed.ids) for feed in feeds if feed.positions[0] == 0]


SIZES = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 6), st.integers(0, 3))


@few(20)
@given(sizes=st.lists(SIZES, min_size=2, max_size=12))
def test_everyone_gets_in_and_in_order_however_narrow_it_is(
    sizes: list[tuple[int, int, int, int]],
) -> None:
    """The engine refuses whatever is past its limits, so the scheduler never tries."""
    clock = FakeClock()
    engine, scheduler = machine(leaning(1), max_slots=60, max_branches=7, clock=clock)
    added, added_s = [], []
    for prompt_tokens, max_tokens, max_threads, steps in sizes:
        added.append(scheduler.add(sized(prompt_tokens, max_tokens, max_threads=max_threads)))
        added_s.append(clock.now_s)
        for _ in range(steps):
            scheduler.step()
    answers = finish(scheduler, added)
    let_in_s = [start_s + answer.queue_s for start_s, answer in zip(added_s, answers, strict=True)]
    assert let_in_s == sorted(let_in_s)
    assert engine.slots_in_use == 0


# Refusals


@pytest.mark.parametrize(
    ("bad_request", "message"),
    [
        (sized(11, 40), "a prompt of 11 tokens and an answer of up to 40 .* the engine's 50 slots"),
        (sized(10, 91), "a prompt of 10 tokens and an answer of up to 91 .* 100 positions"),
        (sized(10, 40, max_threads=8), "an answer of up to 3 branches .* the engine's 2"),
        (sized(0, 40), "the prompt is empty"),
        (replace(greedy(), prompt=(A, SIZE)), f"token id {SIZE} is outside .* of {SIZE}"),
    ],
)
def test_who_could_not_be_answered_even_alone_is_refused(
    bad_request: Request, message: str
) -> None:
    engine, scheduler = machine(ENDLESS, max_positions=100, max_slots=50, max_branches=2)
    with pytest.raises(PastaError, match=message):
        scheduler.add(bad_request)
    assert not scheduler.busy
    assert engine.slots_in_use == 0


def test_memory_that_others_hold_is_waited_for_and_refused_where_there_are_none() -> None:
    engine, scheduler = machine(ENDLESS, max_slots=100)
    foreign = engine.open(reserved_tokens=50)
    first, second = scheduler.add(cells(30)), scheduler.add(cells(40))
    scheduler.step()
    assert first_fed(engine) == [2]
    finish(scheduler, [first, second])
    scheduler.add(cells(60))
    with pytest.raises(PastaError, match="no room for 60 tokens"):
        scheduler.step()
    assert not scheduler.busy
    engine.close(foreign)


# Ways out of the queue


def test_time_runs_out_in_the_queue_and_waiting_is_told_apart() -> None:
    engine, scheduler = machine(ENDLESS, max_slots=100, clock=FakeClock())
    late = cells(80)
    late = replace(late, rules=replace(late.rules, max_seconds=20))
    first, second = scheduler.add(cells(90)), scheduler.add(late)
    while second.result() is None:
        scheduler.step()
    assert first.result() is None
    other, answer = finish(scheduler, [first, second])
    assert (answer.text, answer.truncated, answer.hit_limit) == ("", True, False)
    assert 20 <= answer.queue_s == answer.seconds <= 25
    assert first_fed(engine) == [2]
    assert other.hit_limit
    assert other.queue_s < 5 < other.seconds


def test_a_request_cancelled_in_the_queue_has_an_empty_answer() -> None:
    engine, scheduler = machine(ENDLESS, max_slots=100)
    first, second, third = (scheduler.add(cells(count)) for count in (80, 80, 20))
    scheduler.step()
    scheduler.cancel(second)
    scheduler.step()
    # The one behind it does not have to wait any longer.
    assert scheduler.activity.running == 2
    _, answer, _ = finish(scheduler, [first, second, third])
    assert (answer.text, answer.tree, answer.truncated) == ("", (), True)
    assert answer.events == (Finished(truncated=True),)
    assert answer.seconds == answer.queue_s
    assert answer.trace.prefill_s == 0
    assert answer.first_token_s is None
    assert engine.slots_in_use == 0
