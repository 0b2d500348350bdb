"""The `text` join on the step scheduler: what it feeds again, and what it does not depend on."""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.engines.scripted import ScriptedEngine, follow
from pasta_decoding.lang.layout import Joining, SyncRun
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Closed, Synced
from pasta_decoding.runtime.prefix_cache import PrefillBudget
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.scheduler import Scheduler
from pasta_decoding.runtime.text import ordered
from tests.law.world import SCHEME
from tests.runtime.machine import LINES, finish, greedy, leaning, request
from tests.runtime.play import SIZE, VOCABULARY
from tests.runtime.test_batching import fed_by

SEEDS = range(6)


def scheduler_over(engine: ScriptedEngine, prefill_tokens: int = 256) -> Scheduler:
    return Scheduler(
        engine,
        VOCABULARY,
        SCHEME,
        prefill_budget=PrefillBudget(prefill_tokens),
        joining=Joining.text,
    )


def answers_to(
    requests: Sequence[Request], *, prefill_tokens: int = 256, max_concurrency: bool = True
) -> list[Answer]:
    engine = ScriptedEngine(leaning(7), SIZE)
    scheduler = scheduler_over(engine, prefill_tokens)
    batches = [requests] if max_concurrency else [[one] for one in requests]
    answers = [
        answer
        for batch in batches
        for answer in finish(scheduler, [scheduler.add(one) for one in batch])
    ]
    assert engine.slots_in_use == 0
    return answers


def test_what_is_written_depends_neither_on_the_others_nor_on_how_a_rewrite_is_cut() -> None:
    requests = [request(seed=seed) for seed in SEEDS]
    together, alone = answers_to(requests), answers_to(requests, max_concurrency=False)
    in_pieces = answers_to(requests, prefill_tokens=2)
    assert any(len(answer.layouts) > 1 for answer in together)
    for answer, *others in zip(together, alone, in_pieces, strict=True):
        for other in others:
            assert answer.segments == other.segments
            assert answer.layouts == other.layouts
            if not answer.trimmed_tokens and not other.trimmed_tokens:
                assert fed_by(answer) == fed_by(other)


def test_a_rewrite_is_one_step_however_it_is_cut() -> None:
    requests = [request(seed=seed) for seed in SEEDS]
    for answer in answers_to(requests, max_concurrency=False, prefill_tokens=2):
        if not answer.truncated:
            assert len(answer.trace.step_s) == answer.critical_path
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert (answer.trace.rewritten_tokens > 0) is (syncs > 0)
        assert sum(isinstance(event, Synced) for event in answer.events) == syncs
        assert "".join(ordered(answer.events)) == answer.text


def test_an_engine_with_two_branches_is_enough_for_a_chunk_at_a_time() -> None:
    """Main's own branch ends at a join, and the chunk's becomes main's."""
    engine = ScriptedEngine(follow(*LINES, vocabulary_size=SIZE), SIZE)
    scheduler = scheduler_over(engine)
    number = scheduler.add(greedy())
    [answer] = finish(scheduler, [number])
    assert [type(event) for event in answer.events if isinstance(event, Closed | Synced)] == [
        Closed,
        Synced,
    ]
    assert max(len({b for feed in step for b in feed.branches}) for step in engine.steps) == 2
    assert answer.text == "ca a"
