"""The interpreter's law: any tokens that threads prefer give a well-formed answer that ends."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.constraints import main_constraint
from pasta_decoding.answer.events import (
    Action,
    Append,
    CloseChunk,
    Finished,
    Fork,
    Rewrite,
    Synced,
)
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.text import fed_count, first_tokens
from pasta_decoding.answer.vocabulary import fold_topic
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    MainRun,
    PromiseRun,
    SyncRun,
    in_reading_order,
)
from pasta_decoding.lang.positions import RESERVE, SCHEMES, Scheme
from pasta_decoding.lang.tree import Chunk, Span, read, strip, text_form
from tests.answer.play import (
    ID,
    PROMPT,
    SIZE,
    VOCABULARY,
    Played,
    cycle,
    decode,
    play,
    play_steps,
    script,
)
from tests.examples import few
from tests.law.world import ASYNC, CLOSE, CONTROL, END, OPEN, P20, P50, SCHEME, SYNC

A, B, C, SPACE_A, SPACE_B, SPACE_C = (ID[text] for text in ("a", "b", "c", " a", " b", " c"))
CAPITAL = ID["A"]
CONTROL_IDS = st.sampled_from([OPEN, P20, P50, CLOSE, SYNC, END])
PREFERRED = st.lists(CONTROL_IDS | st.integers(0, SIZE - 1), min_size=1, max_size=40)
RULES = st.builds(
    Rules,
    max_tokens=st.integers(0, 60),
    max_threads=st.integers(1, 4),
    max_chunks=st.integers(0, 4),
    chunk_factor=st.sampled_from([0, 0.1, 3]),
    min_chunk_tokens=st.integers(0, 4),
    max_topic_tokens=st.integers(1, 4),
    parallel=st.sampled_from([True, True, True, False]),
    topic=st.sampled_from([True, True, True, False]),
)
ANY_SCHEME = st.sampled_from(list(SCHEMES.values()))
SMALL = Rules(max_tokens=60, max_topic_tokens=4)


def allowed(interpreter: Interpreter, thread: int = 0) -> set[int]:
    """The ids that a constraint admits."""
    constraint = interpreter.constraint(thread)
    ids = np.arange(SIZE) if constraint.only is None else constraint.only
    return set(ids.tolist()) - set(constraint.banned.tolist())


def assert_texts_kept(played: Played) -> None:
    assert strip(played.tree) == played.text
    assert read(text_form(played.tree)) == played.tree


def assert_topics_differ(played: Played) -> None:
    topics = [decode(ids) for ids in played.topics]
    assert len({fold_topic(topic) for topic in topics}) == len(topics)
    assert all(1 <= len(topic.split()) <= 3 for topic in topics)
    limit = played.interpreter.rules.max_topic_tokens
    assert all(len(ids) <= limit for ids in played.topics)
    forks = [action.topic for action in played.actions if isinstance(action, Fork)]
    topics_in_tree = [node.topic for node in played.tree if isinstance(node, Chunk)]
    assert topics_in_tree == forks[: len(topics_in_tree)]


def assert_within_budget(played: Played) -> None:
    rules = played.interpreter.rules
    assert played.fed_tokens == played.interpreter.budget.written_tokens
    assert fed_count(played.interpreter.segments) <= rules.max_tokens
    assert len(played.steps) <= played.fed_tokens + 2
    assert len(played.chunks) <= rules.max_chunks
    max_chunk_tokens = max(1, rules.min_chunk_tokens, int(50 * rules.chunk_factor))
    assert all(len(chunk.ids) - 1 <= max_chunk_tokens for chunk in played.chunks)


@few(100)
@given(RULES, PREFERRED)
def test_any_wishes_give_a_well_formed_answer_within_the_budget(
    rules: Rules, preferred: list[int]
) -> None:
    played = play(rules, cycle(preferred))
    assert check(text_form(played.tree), topic_required=rules.topic) == []
    assert_texts_kept(played)
    assert_within_budget(played)
    if rules.topic:
        assert_topics_differ(played)


def fed_by(actions: Sequence[Action]) -> list[Append]:
    """Every token that was fed, also by forks."""
    fed = [action for action in actions if isinstance(action, Append)]
    for action in actions:
        if isinstance(action, Fork):
            fed += [action.close, action.opening]
    return fed


@few(60)
@given(RULES, PREFERRED, ANY_SCHEME, st.integers(0, 120))
def test_no_token_is_fed_past_the_models_last_position(
    rules: Rules, preferred: list[int], scheme: Scheme, spare: int
) -> None:
    """If prompt and budget fit. Schemes that skip no position lose no promise to this limit."""
    positions = len(PROMPT) + rules.max_tokens + spare
    played = play(rules, cycle(preferred), scheme=scheme, max_positions=positions)
    for step in played.steps:  # a chunk that ends in a step is not fed in it
        ended = {action.thread for action in step if isinstance(action, CloseChunk)}
        fed = [append for append in fed_by(step) if append.thread not in ended]
        assert all(append.position < positions for append in fed)
    if scheme.name.startswith("shared"):
        unlimited = play(rules, cycle(preferred), scheme=scheme)
        assert played.interpreter.segments == unlimited.interpreter.segments


def test_a_promise_needs_positions_for_the_longest_bucket_and_for_the_rest_of_the_budget() -> None:
    enough = len(PROMPT) + 50 + SMALL.max_tokens
    for positions, promises in ((enough, {OPEN}), (enough - 1, set())):
        interpreter = Interpreter(VOCABULARY, RESERVE, SMALL, len(PROMPT), positions)
        assert allowed(interpreter) & {OPEN} == promises


@few(60)
@given(RULES, PREFERRED, st.integers(0, 30))
def test_stopping_anywhere_keeps_what_was_written(
    rules: Rules, preferred: list[int], steps: int
) -> None:
    played = play(rules, cycle(preferred), stop_after=steps)
    problems = check(text_form(played.tree), topic_required=rules.topic)
    assert {problem.rule for problem in problems} <= {"empty-chunk"}
    assert_texts_kept(played)
    assert len(played.layout.tokens) <= len(PROMPT) + played.fed_tokens
    closed = [action.thread for action in played.actions if isinstance(action, CloseChunk)]
    forked = [action.thread for action in played.actions if isinstance(action, Fork)]
    assert sorted(closed) == forked
    assert len(played.chunks) <= len(forked)


def test_the_actions_of_a_worked_example() -> None:
    """Main: a, promise on b, a, sync, c. The chunk writes c a, which takes longer than main's a."""
    main = [A, OPEN, B, P50, A, SYNC, C]
    played = play(SMALL, script({0: main, 1: [C, A]}))
    assert played.steps[:3] == [[Append(0, A, 3)], [Append(0, OPEN, 4)], [Append(0, B, 5)]]
    assert played.steps[3] == [Fork(1, Append(0, P50, 6), Append(1, ASYNC, 7), "b", 50)]
    assert played.steps[4] == [Append(0, A, 7), Append(1, C, 8)]
    assert played.steps[5] == [Append(1, A, 9)]
    assert played.steps[6] == [CloseChunk(1, truncated=False), Synced((1,)), Append(0, SYNC, 10)]
    assert played.steps[7:] == [[Append(0, C, 11)], [Finished(truncated=False)]]
    assert played.interpreter.segments == [
        MainRun((A,)),
        PromiseRun((OPEN, B, P50), 50),
        ChunkRun((ASYNC, C, A)),
        MainRun((A,)),
        SyncRun(SYNC),
        MainRun((C,)),
    ]


@few(100)
@given(RULES, PREFERRED, st.integers(0, 120))
def test_a_text_join_puts_every_token_where_the_reading_order_has_it(
    rules: Rules, preferred: list[int], spare: int
) -> None:
    positions = len(PROMPT) + rules.max_tokens + spare
    played = play(rules, cycle(preferred), max_positions=positions, joining=Joining.text)
    rewrites = [action for action in played.actions if isinstance(action, Rewrite)]
    segments = played.interpreter.segments
    syncs = [n for n, segment in enumerate(segments) if isinstance(segment, SyncRun)]
    for rewrite, sync in zip(rewrites, syncs, strict=True):
        text = (*PROMPT, *in_reading_order(segments[: sync + 1], CLOSE))
        assert text[rewrite.position :] == rewrite.ids
        assert rewrite.position + len(rewrite.ids) == len(text) <= positions
    assert all(append.position < positions for append in fed_by(played.actions))


def test_an_idle_sync_is_banned_and_every_tag_in_sequential_decoding() -> None:
    for rules, tags in ((SMALL, {OPEN}), (replace(SMALL, parallel=False), set())):
        assert allowed(Interpreter(VOCABULARY, SCHEME, rules, 3, 1000)) & CONTROL.ids == tags
    main = [OPEN, A, P20, A, SYNC, B, SYNC, A]
    played = play(SMALL, script({0: main, 1: [B]}))
    assert sum(isinstance(segment, SyncRun) for segment in played.interpreter.segments) == 1


# Topics


def second_topic(first: list[int], second: list[int], limit: int = 4) -> str:
    """Return the topic of the second promise if main prefers `second` and then to close it."""
    main = [OPEN, *first, P20, OPEN, *second, P20]
    rules = replace(SMALL, max_topic_tokens=limit)
    played = play(rules, script({0: main, 1: [B], 2: [B]}))
    assert_topics_differ(played)
    return decode(played.topics[1])


def test_a_topic_is_not_empty_and_holds_only_fit_tokens() -> None:
    interpreter = play_steps(SMALL, script({0: [OPEN]}), 1).interpreter
    assert {decode([token]) for token in allowed(interpreter)} == {
        *("a", "b", "c", "A", "as", " a", " b", " c", " B", "-", " -", "b.")
    }


@pytest.mark.parametrize(
    ("changes", "main", "promise"),
    [
        ({}, [A, SPACE_B, SPACE_C, SPACE_A], PromiseRun((OPEN, A, SPACE_B, SPACE_C, P20), 20)),
        ({"max_topic_tokens": 2}, [A, P20], PromiseRun((OPEN, A, P20), 20)),
        ({"max_topic_tokens": 2}, [A, B, C, C], PromiseRun((OPEN, A, B, P20), 20, forced=1)),
        ({"topic": False}, [A, P20], PromiseRun((OPEN, P20), 20)),
    ],
)
def test_a_topic_has_three_words_at_most_and_ends_at_its_limit(
    changes: dict[str, Any], main: list[int], promise: PromiseRun
) -> None:
    played = play(replace(SMALL, **changes), script({0: [OPEN, *main], 1: [B]}))
    assert played.interpreter.segments[0] == promise
    assert played.tree[0] == Chunk(decode(promise.ids[1:-1]) or None, 20, "b")


@pytest.mark.parametrize(
    ("first", "again", "limit"),
    [
        *(([A], again, 4) for again in ([A], [CAPITAL], [SPACE_A], [CAPITAL, ID["-"]])),
        ([A], [CAPITAL], 1),
        ([A, B], [CAPITAL, B], 2),
        ([A, SPACE_B], [CAPITAL, ID["-"], B], 3),
        ([A, SPACE_B], [CAPITAL, ID["b."]], 2),
        ([A, SPACE_B, SPACE_C], [CAPITAL, SPACE_B, SPACE_C], 4),
    ],
)
def test_a_topic_that_would_repeat_an_earlier_one_goes_on_or_ends_otherwise(
    first: list[int], again: list[int], limit: int
) -> None:
    assert second_topic(first, again, limit) != decode(again)


def test_no_two_topics_begin_with_the_same_token_while_there_are_others() -> None:
    same = [OPEN, A, B, P20]
    played = play(SMALL, script({0: [*same, *same, *same], 1: [B], 2: [B], 3: [B]}))
    first, *later = (topic[0] for topic in played.topics)
    assert first == A
    assert len({first, *later}) == 3


@given(st.lists(st.integers(0, SIZE - 1), min_size=1), st.integers(0, 30), st.booleans())
def test_biases_are_added_to_the_tags_where_main_may_write_them_and_nowhere_else(
    tokens: list[int], steps: int, parallel: bool
) -> None:
    rules = Rules(
        40,
        max_chunks=3,
        min_chunk_tokens=6,
        parallel=parallel,
        eagerness=2.0,
        sync_bias=-1.0,
    )
    for joining in Joining:
        interpreter = play_steps(rules, cycle(tokens), steps, joining=joining).interpreter
        for thread in interpreter.writing_threads:
            constraint = interpreter.constraint(thread)
            expected = {}
            if thread == 0 and constraint.admits(OPEN):
                expected[OPEN] = 2.0
            if thread == 0 and constraint.admits(SYNC):
                expected[SYNC] = -1.0
            assert constraint.bias == expected


def test_a_vocabulary_lives_no_longer_than_the_answers_that_need_it() -> None:
    vocabulary = replace(VOCABULARY)
    reference = weakref.ref(vocabulary)
    main_constraint(vocabulary, promise=True, sync=True)
    del vocabulary
    assert reference() is None


# Limits


@pytest.mark.parametrize(("factor", "min_tokens", "length"), [(0.5, 4, 10), (0.1, 4, 4), (0, 0, 1)])
def test_a_chunk_at_its_limit_is_closed_and_truncated(
    factor: float, min_tokens: int, length: int
) -> None:
    rules = replace(SMALL, chunk_factor=factor, min_chunk_tokens=min_tokens)
    played = play(rules, script({0: [OPEN, A, P20], 1: [B] * 99}))
    assert played.chunks == [ChunkRun((ASYNC, *[B] * length), closed=False)]
    assert played.actions[-2:] == [CloseChunk(1, truncated=True), Finished(truncated=True)]
    assert played.interpreter.end == END
    assert not played.interpreter.hit_limit


def test_an_answer_with_a_budget_begins_like_the_one_without() -> None:
    main = [A, OPEN, A, P20, C, OPEN, B, P50, SYNC, *[B] * 9]
    threads = {0: main, 1: [C] * 4, 2: [B] * 6}
    segments = play(SMALL, script(threads)).interpreter.segments
    for budget in range(fed_count(segments)):
        played = play(replace(SMALL, max_tokens=budget), script(threads))
        assert played.interpreter.segments == first_tokens(segments, budget)
        assert played.interpreter.hit_limit


@pytest.mark.parametrize(("budget", "chunks"), [(5, 0), (6, 1)])
def test_a_promise_is_kept_with_a_token_of_its_chunk_or_not_at_all(
    budget: int, chunks: int
) -> None:
    played = play(replace(SMALL, max_tokens=budget), script({0: [C, OPEN, A, P20], 1: [C] * 99}))
    assert [len(chunk.ids) - 1 for chunk in played.chunks] == [1] * chunks
    assert played.tree[0] == Span("c")
    assert played.interpreter.hit_limit
