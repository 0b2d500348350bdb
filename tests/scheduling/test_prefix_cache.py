"""Prompts that begin alike are computed once, also after the answer has ended; nothing leaks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.engines.base import Branch, Engine, Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import Joining
from pasta_decoding.scheduling.admission import ResourceRequest
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.generation import FedPrefix, Generation
from pasta_decoding.scheduling.prefix_cache import MAX_PREFIXES, PrefixCache
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.examples import few
from tests.law.world import SCHEME
from tests.scheduling.machine import (
    ENDLESS,
    LINES,
    A,
    B,
    C,
    assert_same,
    finish,
    greedy,
    numbered_request,
    prompt_of,
)
from tests.scripted import ScriptedEngine, follow, shuffled
from tests.tiny import tiny_llama

LONG = prompt_of(1, 40)
LLAMA = tiny_llama(vocabulary=SIZE)


def keeping(engine: Any, pace: int = 256, joining: Joining = Joining.kv) -> Scheduler:
    engine.batch_tokens = pace
    return Scheduler(engine, VOCABULARY, SCHEME, joining=joining, prefix_caching=True)


def asking(*prompt: int, max_tokens: int = 14, parallel: bool = True) -> Request:
    return replace(greedy(), prompt=prompt, rules=Rules(max_tokens=max_tokens, parallel=parallel))


def fed(scheduler: Scheduler, *requests: Request) -> list[int]:
    """Answer `requests` side by side; return how many tokens of each one's prompt were fed."""
    generations = [scheduler.add(request) for request in requests]
    traces = [answer.trace for answer in finish(scheduler, generations)]
    for trace in traces:
        assert trace.prompt_tokens == trace.prefilled_tokens + trace.reused_tokens
    return [trace.prefilled_tokens for trace in traces]


# What is computed


@pytest.mark.parametrize("pace", [7, 256])
def test_choices_of_one_request_compute_its_prompt_once(pace: int) -> None:
    scheduler = keeping(ScriptedEngine(shuffled(SIZE), SIZE), pace)
    assert fed(scheduler, *[asking(*LONG)] * 4) == [40, 1, 1, 1]


def test_a_next_turn_computes_what_is_new_of_it() -> None:
    """The last answer's chunks were written side by side: as text it is read again."""
    scheduler = keeping(ScriptedEngine(follow(*LINES, vocabulary_size=SIZE), SIZE))
    (answer,) = finish(scheduler, [scheduler.add(asking(*LONG, A))])
    assert answer.chunks == 1
    turn = (*LONG, A, C, A, A, C, B, B, B, A)
    assert fed(scheduler, asking(*turn)) == [8]
    assert fed(scheduler, asking(*turn, *turn[-3:])) == [3]


def test_a_sequential_answer_is_not_read_again() -> None:
    scheduler = keeping(ScriptedEngine(ENDLESS, SIZE))
    request = asking(*LONG, A, max_tokens=9, parallel=False)
    (answer,) = finish(scheduler, [scheduler.add(request)])
    written = [fed_token.token for fed_token in answer.trace.fed]
    assert len(written) == 9
    assert fed(scheduler, asking(*LONG, A, *written, B, C, A)) == [3]


def test_whoever_begins_like_one_whose_prompt_is_being_fed_waits_for_it() -> None:
    engine = ScriptedEngine(shuffled(SIZE), SIZE)
    scheduler = keeping(engine, 10)
    assert fed(scheduler, asking(*LONG, A, B, C), asking(*LONG, B, C)) == [43, 2]
    assert [len(feed.ids) for feed in engine.steps[0]] == [10]


def test_a_few_tokens_alike_are_not_worth_it_and_without_the_switch_nothing_is_shared() -> None:
    engine = ScriptedEngine(shuffled(SIZE), SIZE)
    stem, bare = LONG[:15], Scheduler(engine, VOCABULARY, SCHEME)
    assert fed(keeping(engine), asking(*stem, A, B), asking(*stem, B, C)) == [17, 17]
    assert fed(bare, asking(*LONG), asking(*LONG)) == [40, 40]
    assert bare.activity.kept_slots == 0


# What is kept


def test_what_is_kept_goes_as_soon_as_a_request_needs_the_room() -> None:
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=100, max_branches=4)
    scheduler = keeping(engine)
    fed(scheduler, asking(*LONG, A, max_tokens=5, parallel=False))
    assert scheduler.activity.kept_slots == engine.slots_in_use == 46
    generation = scheduler.add(asking(*LONG, *LONG[1:], A, max_tokens=20, parallel=False))
    scheduler.step()
    assert scheduler.activity.running == 1
    assert scheduler.activity.kept_slots == 0
    (answer,) = finish(scheduler, [generation])
    assert (answer.hit_limit, answer.trace.prefilled_tokens) == (True, 80)


def test_it_takes_at_most_half_of_the_cells_and_some_branches_the_oldest_go_first() -> None:
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=4000, max_branches=50)
    scheduler = keeping(engine)
    for number in range(MAX_PREFIXES + 8):
        fed(scheduler, asking(*prompt_of(number, 30), A, max_tokens=2, parallel=False))
    assert scheduler.activity.kept_slots == 33 * MAX_PREFIXES
    engine = ScriptedEngine(ENDLESS, SIZE, max_slots=200)
    scheduler = keeping(engine)
    for number in (1, 2, 3, 1, 4, 1):
        last = fed(scheduler, asking(*prompt_of(number, 30), A, max_tokens=2, parallel=False))
    assert last == [1]
    assert scheduler.activity.kept_slots == engine.slots_in_use == 99


def test_who_begins_another_is_not_kept_beside_it() -> None:
    engine = ScriptedEngine(ENDLESS, SIZE)
    cache = PrefixCache(engine)
    for ids in ((A, B, C), (A, B, C, A), (A, B), (B, C)):
        cache.keep(FedPrefix(ids, branch_of(engine, ids)))
    assert [prefix.ids for prefix in cache._prefixes] == [(A, B, C, A), (B, C)]
    assert engine.slots_in_use == cache.slots == 6
    cache.make_room(ResourceRequest(10**6, 10**6))
    assert cache.slots == 6, "this engine has room for everything"
    cache.close()
    assert engine.slots_in_use == 0


def branch_of(engine: Engine, ids: tuple[int, ...]) -> Branch:
    branch = engine.open(reserved_tokens=20)
    engine.step([Feed((branch,), ids, tuple(range(len(ids))))])
    engine.shrink(branch, len(ids))
    return branch


# Whoever comes and goes

STEMS = [prompt_of(100, 30), prompt_of(100, 18) + prompt_of(101, 20), prompt_of(102, 25)]


def of_a_family(number: int) -> Request:
    """One of many requests of which some begin alike."""
    stem = STEMS[number % 3][: 40 - number]
    request = numbered_request(number, max_tokens=14)
    return replace(request, prompt=stem + prompt_of(number // 3, 1 + number % 5))


def engine_of(name: str) -> Engine:
    if name == "torch":
        return TorchEngine(LLAMA, cache_tokens=300)
    return ScriptedEngine(shuffled(SIZE), SIZE, max_slots=300, max_branches=12)


@cache
def alone(name: str, number: int, joining: Joining) -> Answer:
    scheduler = Scheduler(engine_of(name), VOCABULARY, SCHEME, joining=joining)
    return answer_of(scheduler, of_a_family(number))


DEED = st.tuples(st.sampled_from(["add", "add", "step", "step", "cancel"]), st.integers(0, 14))


@pytest.mark.parametrize("joining", [Joining.kv, Joining.text])
@pytest.mark.parametrize("name", ["scripted", "torch"])
@few(6)
@given(deeds=st.lists(DEED, min_size=6, max_size=30))
def test_answers_are_the_same_and_in_the_end_everything_is_free(
    name: str, joining: Joining, deeds: list[tuple[str, int]]
) -> None:
    """In little room, so that what is kept is given up again and again."""
    engine = engine_of(name)
    scheduler = keeping(engine, 16, joining)
    added: dict[Generation, int] = {}
    for deed, number in deeds:
        if deed == "add":
            added[scheduler.add(of_a_family(number))] = number
        elif deed == "step":
            for _ in range(number):
                scheduler.step()
        elif added:
            gone = list(added)[number % len(added)]
            scheduler.cancel(gone)
            del added[gone]
    answers = finish(scheduler, added)
    for number, answer in zip(added.values(), answers, strict=True):
        assert_same(answer, alone(name, number, joining))
    assert engine.slots_in_use == scheduler.activity.kept_slots <= 150
    scheduler.close()
    assert engine.slots_in_use == 0
