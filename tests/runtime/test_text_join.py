"""The `text` join on the step scheduler: what it feeds again, and what it does not depend on."""

from __future__ import annotations

from pasta_decoding.engines.scripted import ScriptedEngine, follow
from pasta_decoding.lang.layout import Joining, SyncRun
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Closed, Synced
from pasta_decoding.runtime.scheduler import Scheduler
from tests.law.world import SCHEME
from tests.runtime.machine import LINES, fed_by, finish, greedy, leaning, ordered, request
from tests.runtime.play import SIZE, VOCABULARY


def scheduler_over(engine: ScriptedEngine, prefill_tokens: int = 256) -> Scheduler:
    engine.batch_tokens = prefill_tokens
    return Scheduler(engine, VOCABULARY, SCHEME, joining=Joining.text)


def answers(prefill_tokens: int, *, together: bool) -> list[Answer]:
    engine = ScriptedEngine(leaning(7), SIZE)
    scheduler = scheduler_over(engine, prefill_tokens)
    requests = [request(seed=seed) for seed in range(6)]
    batches = [requests] if together else [[one] for one in requests]
    found = [finish(scheduler, [scheduler.add(one) for one in batch]) for batch in batches]
    assert engine.slots_in_use == 0
    return [answer for batch in found for answer in batch]


def test_a_rewrite_is_one_step_and_changes_nothing_however_it_is_cut() -> None:
    whole, in_pieces = answers(256, together=True), answers(2, together=False)
    assert any(len(answer.layouts) > 1 for answer in whole)
    for other, answer in zip(whole, in_pieces, strict=True):
        assert answer.segments == other.segments
        assert answer.layouts == other.layouts
        if not answer.trimmed_tokens and not other.trimmed_tokens:
            assert fed_by(answer) == fed_by(other)
        if not answer.truncated:
            assert len(answer.trace.step_s) == answer.critical_path
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert (answer.trace.rewritten_tokens > 0) is (syncs > 0)
        assert sum(isinstance(event, Synced) for event in answer.events) == syncs
        assert ordered(answer.events) == answer.text


def test_an_engine_with_two_branches_is_enough_for_a_chunk_at_a_time() -> None:
    """Main's own branch ends at a join, and the chunk's becomes main's."""
    engine = ScriptedEngine(follow(*LINES, vocabulary_size=SIZE), SIZE)
    scheduler = scheduler_over(engine)
    generation = scheduler.add(greedy())
    [answer] = finish(scheduler, [generation])
    assert [type(event) for event in answer.events if isinstance(event, Closed | Synced)] == [
        Closed,
        Synced,
    ]
    assert max(len({b for feed in step for b in feed.branches}) for step in engine.steps) == 2
    assert answer.text == "ca a"
