"""Under load new answers are sequential, unless they insist; those under way stay as they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampler, Sampling
from pasta_decoding.server.backend import Ask, Load
from pasta_decoding.server.saturation import Saturation
from tests.server.running import HELLO, MODEL, Running, running, wait_for
from tests.server.scripts import Slow, Stepped, saying, with_engine

RULES = Rules(max_tokens=60)
LOADS = st.builds(Load, st.integers(1, 99), st.integers(0, 99))


def decided(load: Load, *, up_to: int | None, insists: bool = False, rules: Rules = RULES) -> Rules:
    ask = Ask((1,), rules, Sampling(), insists=insists)
    return Saturation(up_to).request(ask, Request((1,), Sampler(Sampling()), rules), load).rules


@given(LOADS, st.integers(0, 99))
def test_beyond_the_limit_and_only_there_promises_are_banned(load: Load, limit: int) -> None:
    under_way = load.running + load.waiting
    assert decided(load, up_to=limit) == replace(RULES, parallel=under_way <= limit)


@given(LOADS)
def test_without_a_limit_or_with_insistence_load_changes_nothing(load: Load) -> None:
    assert decided(load, up_to=None) == RULES
    assert decided(load, up_to=0, insists=True) == RULES


@given(LOADS, st.integers(0, 99))
def test_nobody_is_made_parallel_who_did_not_want_it(load: Load, limit: int) -> None:
    sequential = replace(RULES, parallel=False)
    assert decided(load, up_to=limit, rules=sequential) is sequential


@pytest.fixture
def scripted(decoder: LocalDecoder) -> LocalDecoder:
    return with_engine(decoder, saying(decoder, "One: ", "one", "a chunk", " End."), Slow)


def asked(server: Running, **fields: Any) -> tuple[str, Any]:
    """Return an answer's text and its usage."""
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "temperature": 0}
    found = server.ask("/v1/chat/completions", body | fields).json
    return found["choices"][0]["message"]["content"], found["usage"]


def test_an_answer_alone_is_parallel_and_says_so(scripted: LocalDecoder) -> None:
    with running(scripted, parallel_up_to=1) as server:
        text, usage = asked(server)
        assert text == "One: a chunk End."
        assert (usage["threads"], usage["sequential_choices"]) == (2, 0)
        assert server.metric("pasta_load_sequential_total") == 0


def test_answers_beyond_the_limit_are_the_sequential_ones_and_are_counted(
    scripted: LocalDecoder,
) -> None:
    with running(scripted, parallel_up_to=0) as server:
        text, usage = asked(server)
        assert text == asked(server, pasta_parallel=False)[0]
        assert (usage["threads"], usage["sequential_choices"]) == (1, 1)
        assert server.metric("pasta_load_sequential_total") == 1, "who asked for it is not counted"


def test_who_insists_gets_the_same_answer_under_any_load(scripted: LocalDecoder) -> None:
    with running(scripted, max_concurrency=2, parallel_up_to=0) as server:
        with ThreadPoolExecutor(6) as crowd:
            found = list(crowd.map(lambda _: asked(server, pasta_parallel=True), range(6)))
        assert {text for text, _ in found} == {"One: a chunk End."}
        assert {usage["sequential_choices"] for _, usage in found} == {0}


def test_each_choice_counts_as_an_answer(scripted: LocalDecoder) -> None:
    with running(scripted, parallel_up_to=2) as server:
        assert asked(server, n=2)[1]["sequential_choices"] == 0
        assert asked(server, n=3)[1]["sequential_choices"] == 3


def test_whoever_is_under_way_stays_parallel_when_others_come(decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "one", "a chunk", " End.")
    stepped = with_engine(decoder, script, Stepped)
    engine = stepped.engine
    assert isinstance(engine, Stepped)
    with running(stepped, parallel_up_to=1) as server, ThreadPoolExecutor(2) as crowd:
        first = crowd.submit(asked, server)
        wait_for(lambda: engine.begun == 1)
        second = crowd.submit(asked, server)
        wait_for(lambda: server.ask("/health").json["running"] == 2)
        engine.permits.release(1000)
        assert first.result()[1]["sequential_choices"] == 0
        assert second.result()[1]["sequential_choices"] == 1
