"""The scheduler: company never changes an answer, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.engines.scripted import Script, ScriptedEngine, follow, shuffled
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, ChunkRun
from pasta_decoding.lang.tree import read
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import answer_of
from pasta_decoding.runtime.events import (
    Closed,
    Delta,
    Event,
    Finished,
    Opened,
    Ordered,
    Synced,
    ordered,
)
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampler, Sampling
from pasta_decoding.runtime.scheduler import Request, Scheduler
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SCHEME, SYNC
from tests.runtime.play import ID, SIZE, VOCABULARY

A, B, C, SPACE_A = (ID[text] for text in ("a", "b", "c", " a"))
# Promises would be rare otherwise, and answers short.
LEANING_V = np.zeros(SIZE, dtype=np.float32)
LEANING_V[[OPEN, CLOSE, SYNC, P20]] = 1.5
LEANING_V[END] = -1
RULES = Rules(max_tokens=40, max_threads=4, max_topic_tokens=3, min_chunk_tokens=6)
PROMPTS = [(A, B), (A, C, C), (B,), (C, A, B)]
LINES = [(A, OPEN, B, P20), (B, ASYNC), (P20, ASYNC, C, A, CLOSE), (P20, SPACE_A, SYNC, C, END)]
"""Main: a, a promise on b, ' a', sync, c. The chunk writes c a."""


def leaning(seed: int) -> Script:
    plain = shuffled(SIZE, seed)

    def script(seen: tuple[int, ...]) -> FloatArray:
        return plain(seen) + LEANING_V

    return script


def machine(
    script: Script, *, max_positions: int = 4096, clock: FakeClock | None = None
) -> tuple[ScriptedEngine, Scheduler]:
    engine = ScriptedEngine(script, SIZE, max_positions)
    if clock is None:
        return engine, Scheduler(engine, VOCABULARY, SCHEME)
    return engine, Scheduler(engine, VOCABULARY, SCHEME, clock=clock)


class FakeClock:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def request(prompt: Sequence[int] = (A, B), *, number: int = 0, seed: int = 0) -> Request:
    sampler = Sampler(Sampling(temperature=1, seed=seed), request=number)
    return Request(tuple(prompt), sampler, RULES)


def greedy(*, max_seconds: float | None = None) -> Request:
    return Request((C, C, A), Sampler(Sampling()), RULES, max_seconds)


def together(scheduler: Scheduler, requests: Sequence[Request], *, waits: int = 0) -> list[Answer]:
    """Answer all requests at once; each joins `waits` steps behind the one before."""
    numbers = []
    for one in requests:
        numbers.append(scheduler.add(one))
        for _ in range(waits):
            scheduler.step()
    while scheduler.busy:
        scheduler.step()
    answers = [scheduler.result(number) for number in numbers]
    return [answer for answer in answers if answer is not None]


def answer(seed: int) -> Answer:
    return answer_of(machine(leaning(seed))[1], request(seed=seed))


# Company


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_requests_together_write_what_they_write_alone(seed: int, waits: int) -> None:
    requests = [request(prompt, number=number, seed=seed) for number, prompt in enumerate(PROMPTS)]
    alone = [answer_of(machine(leaning(seed))[1], one) for one in requests]
    engine, scheduler = machine(leaning(seed))
    for ours, theirs in zip(together(scheduler, requests, waits=waits), alone, strict=True):
        assert ours.layout == theirs.layout
        assert ours.events == theirs.events
        assert [f.token for f in ours.trace.fed] == [f.token for f in theirs.trace.fed]
        assert ours.overruled == theirs.overruled
    assert engine.cells_in_use == 0


def test_requests_share_the_forward_pass() -> None:
    engine, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    together(scheduler, [greedy() for _ in range(3)])
    prefills = 3
    answered = len(engine.steps) - prefills
    assert answered == answer_of(scheduler, greedy()).critical_path


# Records


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_every_token_is_fed_once_at_its_place(seed: int) -> None:
    """All but those of a promise that the budget cut off, which the answer does not hold."""
    got = answer(seed)
    layout = got.layout
    columns = zip(layout.thread, layout.step, layout.tokens, layout.position, strict=True)
    compiled = Counter(row for row in columns if row[1] > 0)
    fed = Counter((f.thread, f.step, f.token, f.position) for f in got.trace.fed)
    assert compiled <= fed
    assert got.hit_limit or compiled == fed
    assert {thread for thread, *_ in fed - compiled} <= {MAIN}
    assert got.fed_tokens == len(got.trace.fed) == sum(step.fed for step in got.trace.steps)
    assert len(got.trace.steps) >= got.critical_path


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_events_fold_to_the_text_and_never_take_any_back(seed: int) -> None:
    got = answer(seed)
    shown, fold = "", Ordered()
    for event in got.events:
        shown += fold.feed(event)
        assert got.text.startswith(shown)
    assert shown == got.text
    assert read(got.annotated) == got.tree
    assert got.events[-1] == Finished(got.truncated)
    closed = [event.truncated for event in got.events if isinstance(event, Closed)]
    assert (len(closed), sum(closed)) == (got.chunks, got.truncated_chunks)


def test_the_laws_above_are_about_answers_with_everything_in_them() -> None:
    answers = [answer(seed) for seed in range(30)]
    kinds = {type(event) for got in answers for event in got.events}
    assert kinds == {Opened, Delta, Closed, Synced, Finished}
    assert {got.hit_limit for got in answers} == {True, False}
    assert any(got.chunks > 2 for got in answers)


def test_the_events_of_a_worked_example() -> None:
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    got = answer_of(scheduler, greedy())
    assert got.events == [
        Opened(1, "b", 20),
        Delta(MAIN, " a"),
        Delta(1, "c"),
        Delta(1, "a"),
        Closed(1, truncated=False),
        Synced((1,)),
        Delta(MAIN, "c"),
        Finished(truncated=False),
    ]
    assert got.annotated == '<promise topic="b" tokens="20"/><async>ca</async> a<sync/>c'
    assert got.text == "ca ac"
    # Topic, closing, c, a, sync, c: the end is never fed.
    assert got.critical_path == 7
    assert (got.overruled, got.truncated, got.hit_limit) == (0, False, False)


def test_events_are_handed_out_once_as_they_come() -> None:
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    number = scheduler.add(greedy())
    events: list[Event] = []
    while scheduler.result(number) is None:
        scheduler.step()
        events += scheduler.drain_events(number)
    assert scheduler.drain_events(number) == []
    assert events == answer_of(scheduler, greedy()).events


def test_an_end_of_sequence_in_a_chunk_is_an_intervention() -> None:
    lines = [(P20, ASYNC, C, END), (A, OPEN, B, P20, END)]
    _, scheduler = machine(follow(*lines, vocabulary_size=SIZE))
    got = answer_of(scheduler, greedy())
    assert (got.overruled, got.truncated) == (1, False)


# Ends


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 12, 16, 20, 25])
def test_cancelling_at_any_step_frees_everything_and_keeps_what_there_was(steps: int) -> None:
    engine, scheduler = machine(leaning(4))
    number = scheduler.add(request(seed=4))
    other = scheduler.add(request((C, C), number=1))
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(number)
    got = scheduler.result(number)
    assert got is not None
    assert got.truncated
    assert "".join(ordered(got.events)) == got.text
    scheduler.cancel(other)
    assert engine.cells_in_use == 0
    assert not scheduler.busy


def test_cancelling_one_request_leaves_the_others_alone() -> None:
    alone = answer_of(machine(leaning(4))[1], request((C, C), number=1))
    _, scheduler = machine(leaning(4))
    number = scheduler.add(request(seed=4))
    other = scheduler.add(request((C, C), number=1))
    scheduler.step()
    scheduler.cancel(number)
    while scheduler.busy:
        scheduler.step()
    got = scheduler.result(other)
    assert got is not None
    assert got.layout == alone.layout


def test_cancelling_twice_or_what_has_ended_does_nothing() -> None:
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    number = scheduler.add(greedy())
    scheduler.close()
    first = scheduler.result(number)
    scheduler.cancel(number)
    assert scheduler.result(number) is first


def test_an_answer_ends_when_its_time_is_up() -> None:
    endless = follow((A, OPEN, B, P20, C), (ASYNC, B), (B, B), (C, C), vocabulary_size=SIZE)
    engine, scheduler = machine(endless, clock=FakeClock())
    got = answer_of(scheduler, greedy(max_seconds=30))
    assert 30 <= got.seconds <= 36
    assert got.truncated
    assert not got.hit_limit
    assert [segment.closed for segment in got.segments if isinstance(segment, ChunkRun)] == [False]
    assert engine.cells_in_use == 0
    assert answer_of(scheduler, greedy()).hit_limit


def test_an_answer_that_ends_at_once_holds_nothing() -> None:
    engine, scheduler = machine(follow((A, END), vocabulary_size=SIZE))
    got = scheduler.result(scheduler.add(greedy()))
    assert got is not None
    assert (got.text, got.tree, got.critical_path) == ("", (), 0)
    assert engine.cells_in_use == 0


# Refusals


def test_a_prompt_and_budget_that_do_not_fit_are_refused_and_nothing_is_held() -> None:
    engine, scheduler = machine(leaning(0), max_positions=42)
    assert answer_of(scheduler, request((A, B))).fed_tokens <= 40
    with pytest.raises(PastaError) as caught:
        scheduler.add(request((A, B, C)))
    assert str(caught.value) == (
        "a prompt of 3 tokens and an answer of up to 40 do not fit the model's 42 positions"
    )
    assert caught.value.hint == "Use a shorter prompt, or allow fewer tokens for the answer."
    assert engine.cells_in_use == 0
    assert not scheduler.busy


def test_an_empty_prompt_is_refused() -> None:
    engine, scheduler = machine(leaning(0))
    with pytest.raises(PastaError, match=r"^the prompt is empty$"):
        scheduler.add(request(()))
    assert engine.cells_in_use == 0
