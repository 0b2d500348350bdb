"""The scheduler and one answer: what is recorded and told, how it ends, who shares a pass."""

import pytest

from pasta_decoding.answer.events import Closed, Delta, Event, Finished, Opened, Synced
from pasta_decoding.engines.base import FloatArray
from pasta_decoding.lang.layout import MAIN, ChunkRun
from pasta_decoding.scheduling.decoder import answer_of
from tests.answer.play import SIZE
from tests.law.whim import EveryThread
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SYNC
from tests.scheduling.machine import LINES, A, B, C, FakeClock, finish, greedy, machine, request
from tests.scripted import follow

# Records


def test_the_events_of_a_worked_example_are_handed_out_once_as_they_come() -> None:
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    generation = scheduler.add(greedy())
    events, text, steps = list[Event](), "", list[int]()
    while (got := generation.result()) is None:
        scheduler.step()
        if progress := generation.drain():
            events += progress.events
            text += progress.text
            steps.append(progress.step)
    assert generation.drain() is None
    assert steps == sorted(steps)
    assert steps[-1] == len(got.trace.step_s)
    assert got.events == tuple(events)
    assert events == [
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
    assert got.text == text == "ca ac"
    # Topic, closing, c, a, sync, c: the end is never fed.
    assert got.critical_path == 7
    assert (got.interventions, got.truncated, got.hit_limit) == (0, False, False)


def test_an_end_of_sequence_in_a_chunk_is_an_intervention() -> None:
    lines = [(P20, ASYNC, C, END), (A, OPEN, B, P20, END)]
    _, scheduler = machine(follow(*lines, vocabulary_size=SIZE))
    got = answer_of(scheduler, greedy())
    assert (got.interventions, got.truncated) == (1, False)


# Ends


def test_an_answer_ends_when_its_time_is_up() -> None:
    endless = follow((A, OPEN, B, P20, C), (ASYNC, B), (B, B), (C, C), vocabulary_size=SIZE)
    engine, scheduler = machine(endless, clock=FakeClock())
    got = answer_of(scheduler, greedy(max_seconds=30))
    assert 30 <= got.seconds <= 36
    assert got.first_token_s is not None
    assert 0 < got.first_token_s < got.seconds
    assert got.truncated
    assert (got.hit_limit, got.finish_reason) == (False, "length")
    assert [segment.closed for segment in got.segments if isinstance(segment, ChunkRun)] == [False]
    assert engine.slots_in_use == 0
    assert answer_of(scheduler, greedy()).hit_limit


# Forward passes


def test_requests_share_the_forward_pass() -> None:
    engine, scheduler = machine(follow(*LINES, vocabulary_size=SIZE), policy=EveryThread())
    answers = finish(scheduler, [scheduler.add(greedy()) for _ in range(3)])
    prefill = 1
    assert len(engine.steps) == prefill + answers[0].critical_path


def test_finished_chunks_share_a_branch_until_they_are_joined() -> None:
    """Three chunks one after the other, then a sync, with branches for two threads and one more."""
    promises = [(OPEN, B, P20, A, A, A), (OPEN, C, P20, B, B, B), (OPEN, A, P20, C, C, C)]
    main = (A, *promises[0], *promises[1], *promises[2], SYNC, END)
    script = follow(main, (ASYNC, C, CLOSE), vocabulary_size=SIZE)
    _, scheduler = machine(script, max_branches=3)
    answer = answer_of(scheduler, greedy(max_threads=2))
    assert answer.text == "caaacbbbcccc"
    assert [event for event in answer.events if isinstance(event, Synced)] == [Synced((1, 2, 3))]


# Errors that are nobody's fault


def breaking(seen: tuple[int, ...]) -> FloatArray:
    """Worked lines for everyone but those whose prompt has a b, which break the engine."""
    if B in seen[:1]:
        raise RuntimeError("the device is gone")
    return follow(*LINES, vocabulary_size=SIZE)(seen)


def test_an_error_of_the_engine_ends_who_was_in_the_pass_and_nobody_else() -> None:
    engine, scheduler = machine(breaking, max_slots=100)
    ended = [scheduler.add(request((B, A))), scheduler.add(greedy())]
    waiting = scheduler.add(greedy())
    with pytest.raises(RuntimeError, match="the device is gone"):
        scheduler.step()
    assert engine.slots_in_use == 0
    for generation in ended:
        with pytest.raises(RuntimeError, match="the device is gone"):
            generation.result()
        scheduler.cancel(generation)
    (got,) = finish(scheduler, [waiting])
    assert got.events == answer_of(scheduler, greedy()).events
    assert got.text == "ca ac"
    assert engine.slots_in_use == 0
