"""The law of time: when a thread writes changes nothing.

Under any schedule an answer is the same, token by token: its segments, its layout, its text, and
where a budget or a stop string ends it.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.text import AnswerText
from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import Joining, Segment
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.policy import SchedulingPolicy
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.examples import few
from tests.law import world
from tests.law.test_law import assert_same_logits, compiled, engine_named
from tests.law.watched import Replay, Watched
from tests.law.whim import EveryThread, ReadingOrder, Whim
from tests.scheduling.machine import assert_same, finish, numbered_request
from tests.scripted import ScriptedEngine, shuffled
from tests.tiny import tiny_llama

LLAMA = tiny_llama(vocabulary=SIZE)
SPACIOUS = 10_000
POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "eager": EveryThread,
    "in reading order": ReadingOrder,
    "cheapest": SchedulingPolicy,
}
LIMITS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 70),
        "max_threads": st.integers(1, 5),
        "stop": st.sampled_from([(), (), ("b",), ("ab", "ca"), ("c a", "-")]),
    }
)


def engine_of(kind: str, max_slots: int | None = None) -> Engine:
    if kind == "scripted":
        return ScriptedEngine(shuffled(SIZE), SIZE, max_slots=max_slots, max_branches=max_slots)
    return TorchEngine(LLAMA)


def scheduler_of(engine: Engine, joining: Joining, policy: SchedulingPolicy) -> Scheduler:
    return Scheduler(engine, VOCABULARY, world.SCHEME, joining=joining, policy=policy)


def alone(kind: str, joining: Joining, request: Request) -> Answer:
    """Return the answer of a request that has the engine to itself and runs every thread."""
    return answer_of(scheduler_of(engine_of(kind), joining, EveryThread()), request)


def text_of_events(answer: Answer) -> str:
    """Return the text of an answer's events; at each event it is a prefix of the whole text."""
    fold = AnswerText()
    text = ""
    for event in answer.events:
        text += fold.feed(event)
        assert answer.text.startswith(text)
    return text


@pytest.mark.parametrize("joining", list(Joining))
@pytest.mark.parametrize("kind", ["scripted", "torch"])
@few(12)
@given(
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    limits=LIMITS,
    seed=st.integers(0, 10_000),
    spare_cells=st.integers(0, 200),
)
def test_any_schedule_gives_the_same_answer(
    kind: str,
    joining: Joining,
    numbers: list[int],
    limits: dict[str, Any],
    seed: int,
    spare_cells: int,
) -> None:
    requests = [numbered_request(number, **limits) for number in numbers]
    engine = engine_of(kind, 240 + spare_cells)
    scheduler = scheduler_of(engine, joining, Whim(seed))
    answers = finish(scheduler, [scheduler.add(request) for request in requests])
    assert engine.slots_in_use == 0
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, alone(kind, joining, request))
        if not request.rules.stop:
            assert text_of_events(answer) == answer.text


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("clients", [1, 6])
def test_the_policies_give_the_answers_that_the_requests_get_alone(name: str, clients: int) -> None:
    requests = [numbered_request(number, max_tokens=25) for number in range(clients)]
    scheduler = scheduler_of(engine_of("torch"), Joining.kv, POLICIES[name]())
    answers = finish(scheduler, [scheduler.add(request) for request in requests])
    for number, answer in enumerate(answers):
        assert_same(answer, alone_of(number))


@cache
def alone_of(number: int) -> Answer:
    return alone("torch", Joining.kv, numbered_request(number, max_tokens=25))


@few(10)
@given(prompt=world.PROMPTS, segments=world.answers(), seed=st.integers(0, 10_000))
def test_training_sees_what_any_schedule_saw(
    prompt: tuple[int, ...], segments: list[Segment], seed: int
) -> None:
    recorder = Watched(Replay(segments, async_close=world.CLOSE, end=world.END))
    engine = engine_named("torch-llama")
    scheduler = Scheduler(engine, world.VOCABULARY, world.SCHEME, policy=Whim(seed))
    answer = answer_of(scheduler, Request(prompt, recorder, Rules(max_tokens=256)))
    layout = compiled(prompt, segments)
    assert answer.layouts == (layout,)
    columns = zip(layout.thread, layout.tokens, layout.position, strict=True)
    fed = sorted((token.thread, token.token, token.position) for token in answer.trace.fed)
    assert fed == sorted(list(columns)[len(prompt) :])
    assert_same_logits("torch-llama", [layout], recorder)


def test_the_laws_above_are_about_cuts_of_every_kind() -> None:
    """Budgets and stop strings, in chunks and in main, with something to trim."""
    chance = Random(0)
    endings: set[str] = set()
    for number in range(40):
        limits = {"max_tokens": chance.randrange(8, 200), "max_threads": 3, "stop": ()}
        if number % 2:
            limits["stop"] = ("ab", "ca")
        request = numbered_request(number, **limits)
        engine = engine_of("scripted", SPACIOUS)
        answer = answer_of(scheduler_of(engine, Joining.kv, Whim(number)), request)
        if answer.hit_limit:
            endings.add("hit")
        elif answer.stopped:
            endings.add("stopped")
        else:
            endings.add("ended")
        if answer.trimmed_tokens:
            endings.add("trimmed")
        if answer.truncated_chunks:
            endings.add("in a chunk")
    assert endings == {"hit", "stopped", "ended", "trimmed", "in a chunk"}
