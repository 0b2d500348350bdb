"""The figures of a bench, each from numbers small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pasta_decoding.evaluation.bare import BareTimes
from pasta_decoding.evaluation.bench_answers import Examined, summary
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.timing import Timing
from pasta_decoding.lang.measures import (
    geometric_mean,
    ideal_speedup,
    own_speedup,
    rep_4,
    repeated_chunks,
)
from pasta_decoding.lang.tree import read


def tree_of(*chunks: str) -> str:
    promise = '<promise topic="a" tokens="20"/>'
    return "".join(f"{promise}<async>{chunk}</async>\n" for chunk in chunks)


def test_own_speedup_is_plain_tokens_over_critical_path() -> None:
    assert own_speedup(90, 60) == 1.5


@pytest.mark.parametrize(("plain_tokens", "critical_path"), [(0, 0), (0, 4)])
def test_an_answer_without_text_has_the_speedup_one(plain_tokens: int, critical_path: int) -> None:
    assert own_speedup(plain_tokens, critical_path) == 1.0


def test_the_geometric_mean_of_two_and_eight_is_four() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(("topic", "critical_path"), [('topic="x" ', 16), ("", 10)])
def test_a_promise_costs_an_ideal_answer_two_tokens_and_its_topic_three(
    topic: str, critical_path: int
) -> None:
    # A token a character: two promises of 5 or 2 tokens, the last chunk's 5, and the sync.
    chunk = f'<promise {topic}tokens="20"/><async>a b c</async>'
    tree = read(f"{chunk}{chunk}<sync/>")
    assert ideal_speedup(tree, len) == 10 / critical_path


def test_there_is_no_geometric_mean_of_nothing() -> None:
    assert geometric_mean([]) is None


def test_a_chunk_counts_as_repeated_when_most_of_its_word_pairs_stand_in_an_earlier_one() -> None:
    # Pairs of "A b c": a-b, b-c. "x a b c" shares 2 of 3, "b c d" 1 of 2, which is not most.
    assert repeated_chunks(read(tree_of("A b c", "x a B C"))) == 1
    assert repeated_chunks(read(tree_of("A b c", "b c d"))) == 0
    assert repeated_chunks(read(tree_of("a b", "a b", "a b"))) == 2


def test_pairs_of_different_siblings_do_not_add_up() -> None:
    assert repeated_chunks(read(tree_of("a b", "c d", "a b x c d"))) == 0


def test_main_text_and_chunks_of_one_word_are_never_repeated() -> None:
    assert repeated_chunks(read("a b " + tree_of("a b"))) == 0
    assert repeated_chunks(read(tree_of("Paris", "Paris", ""))) == 0


def test_repeated_grams_are_the_share_of_runs_of_words_that_occurred_before() -> None:
    assert rep_4("a b c d a b c d") == pytest.approx(1 / 5)
    assert rep_4("a b a b", n=2) == pytest.approx(1 / 3)
    assert rep_4("a b c") == 0.0


PARALLEL = Examined(
    Record(
        "1",
        "p",
        plain_tokens=90,
        critical_path=30,
        chunks=4,
        syncs=1,
        fed_tokens=100,
        interventions=3,
        repeated_chunks=1,
        truncated_chunks=2,
        promises=[(20, 18), (60, 20)],
        near_promises=1,
        hit_limit=True,
        text="a b c d a b c d",
    ),
    sequential_tokens=80,
    timing=Timing(sequential_s=8.0, parallel_s=4.0, ideal_s=3.0),
)
PLAIN = Examined(Record("2", "q", text="1. 1.", plain_tokens=30, critical_path=30, fed_tokens=50))
FAILED = Examined(Record("3", "r", error="the prompt is empty"))


def test_a_summary_by_hand_of_one_answer_in_chunks_one_plain_one_and_a_failed_request() -> None:
    figures = summary([PARALLEL, PLAIN, FAILED])
    figures.pop("machine")
    figures.pop("commit")
    assert figures == {
        "answers": 3,
        "failures": 1,
        "malformed": 0,
        "with_promise": 0.5,
        "own_speedup": pytest.approx(3**0.5),
        "own_speedup_with_promise": pytest.approx(3.0),
        "replay_speedup": pytest.approx(2.0),
        "interpreter_efficiency": pytest.approx(0.75),
        "timed": 1,
        "interventions": 3,
        "interventions_per_token": 0.02,
        "chunks": 4,
        "syncs": 1,
        "repeated_chunks": 0.25,
        "truncated_chunks": 0.5,
        "near_promises": 0.5,
        "buckets": {20: 0.5, 60: 0.5},
        "buckets_in_use": 2,
        "hit_limit": 0.5,
        "empty_scaffolds": 0.5,
        "rep_4": pytest.approx(0.1),
        "plain_tokens_mean": 60.0,
        "compared": 1,
        "compared_hit_limit": 1.0,
        "sequential_hit_limit": 0.0,
        "sequential_tokens_mean": 80.0,
    }


@pytest.mark.parametrize(
    "examined",
    [replace(PLAIN, well_formed=False), replace(PLAIN, shown_equals_text=False)],
)
def test_a_broken_text_form_and_a_stream_that_differs_are_malformed(examined: Examined) -> None:
    assert summary([examined])["malformed"] == 1


def test_figures_of_nothing_are_none_and_not_zero() -> None:
    figures = summary([FAILED])
    assert figures["failures"] == 1
    for name in ("own_speedup", "with_promise", "hit_limit", "plain_tokens_mean"):
        assert figures[name] is None, name


def test_bare_times_are_the_median_of_one_measurement_a_width_and_stretch() -> None:
    calls: list[tuple[int, int]] = []

    def call(width: int, cells: int, repeats: int) -> list[float]:
        calls.append((width, cells))
        return [5.0, 1.0, 3.0][:repeats]

    times = BareTimes(call, repeats=3)
    assert times(2, 100) == 3.0
    assert times(2, 150) == 3.0
    assert calls == [(2, 128)]
    assert times(2, 1) == 3.0
    assert calls[1:] == [(2, 64)]
