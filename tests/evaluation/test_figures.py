"""Speedups and shares of a run, worked by hand, with failures inside."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import drawn
from pasta_decoding.evaluation.figures import RecordPair, figures, geometric, speeds
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import MethodRun
from tests.runfolders import failed, parallel, record


def run_of(method: str, records: list[Record]) -> MethodRun:
    by_id = {one.id: one for one in records}
    return MethodRun(Path(method), {"method": method, "max_tokens": 400}, by_id, {}, {}, {})


def pair(ours: list[Record], theirs: list[Record] | None = None) -> RecordPair:
    return RecordPair(
        run_of("pasta", ours),
        run_of("sequential", theirs or [record(number) for number in range(len(ours))]),
    )


def test_speedups_are_geometric_means_of_each_prompts_ratio() -> None:
    found = figures(pair([parallel(0, critical_path=50), parallel(1, critical_path=25)]))
    # Of 100 tokens: 2 and 4 times, so the root of 8.
    assert found.speedups["own"].value == pytest.approx(math.sqrt(8))
    assert found.speedups["theoretical"].value == pytest.approx(math.sqrt(8))


def test_the_theoretical_speedup_counts_the_baselines_tokens() -> None:
    shorter = parallel(0, plain_tokens=60, critical_path=30)
    found = figures(pair([shorter], [record(0, plain_tokens=300)]))
    assert found.speedups["own"].value == pytest.approx(2)
    assert found.speedups["theoretical"].value == pytest.approx(10)


def test_a_failed_request_counts_with_its_whole_budget() -> None:
    base = [record(number, turns="t") for number in range(2)]
    ours = [parallel(0, turns="t", seconds=5.0), failed(1, turns="t")]
    found = figures(pair(ours, base))
    assert (found.prompts, found.failures) == (2, 1)
    assert found.speedups["own"].value == pytest.approx(math.sqrt(2 * 1))
    # 400 steps for the baseline's 100 tokens, 60 seconds for its 10.
    assert found.speedups["theoretical"].value == pytest.approx(math.sqrt(2 / 4))
    assert found.speedups["wall_clock"].value == pytest.approx(math.sqrt(2 * 10 / 60))
    # As many tokens as the baseline's, and one for its hundred.
    assert found.speedups["per_token"].value == pytest.approx(math.sqrt(2 * 10 / 60 / 100))


def test_a_shorter_answer_gains_nothing_per_token() -> None:
    half = parallel(0, turns="t", plain_tokens=50, seconds=5.0)
    found = figures(pair([half], [record(0, turns="t")])).speedups
    assert found["wall_clock"].value == pytest.approx(2)
    assert found["per_token"].value == pytest.approx(1)


def test_a_prompt_without_a_baseline_has_no_ratio_and_is_counted() -> None:
    found = figures(pair([parallel(0), parallel(1)], [record(0), failed(1)]))
    assert found.no_baseline == 1
    assert found.speedups["theoretical"].value == pytest.approx(2)
    assert found.speedups["own"].value == pytest.approx(2)


def test_there_is_a_wall_clock_speedup_only_where_both_were_timed() -> None:
    timed, shared = record(0, turns="t"), record(0)
    assert "wall_clock" in speeds(pair([parallel(0, turns="t")], [timed]))
    assert "wall_clock" not in speeds(pair([parallel(0, turns="t")], [shared]))
    assert "wall_clock" not in speeds(pair([parallel(0)], [timed]))


def test_seconds_of_different_turns_are_not_compared() -> None:
    with pytest.raises(PastaError, match="pasta and sequential were not timed together"):
        speeds(pair([parallel(0, turns="yesterday")], [record(0, turns="today")]))


def test_a_timed_record_without_seconds_is_refused() -> None:
    with pytest.raises(PastaError, match="has no seconds"):
        figures(pair([failed(0, seconds=0.0, turns="t")], [record(0, turns="t")]))


def test_prompts_are_binned_by_the_length_of_the_baselines_answer() -> None:
    base = [record(n, plain_tokens=size, turns="t") for n, size in enumerate((49, 50, 900))]
    base.append(failed(4, turns="t"))  # nobody knows the length of its answer
    ours = [parallel(n, critical_path=10 * (n + 1), turns="t") for n in (0, 1, 2, 4)]
    found = figures(pair(ours, base))
    assert {name: one.prompts for name, one in found.by_length.items()} == {
        "0 to 49": 1,
        "50 to 99": 1,
        "400 and more": 1,
    }
    speedups = found.by_length["50 to 99"].speedups
    assert speedups["theoretical"].value == pytest.approx(50 / 20)
    assert speedups["wall_clock"].value == pytest.approx(1)
    assert {name: one.prompts for name, one in found.by_dataset.items()} == {
        "koala": 3,
        "selfinstruct": 1,
    }


def test_shares_are_of_all_answers_failures_included() -> None:
    found = figures(pair([parallel(0), record(1), failed(2), parallel(3, hit_limit=True)]))
    assert found.with_promise.value == pytest.approx(0.5)
    assert found.hit_limit.value == pytest.approx(0.25)
    assert found.chunks_mean == 1
    assert found.plain_tokens_mean == 75


def test_promises_are_compared_with_what_was_written() -> None:
    found = figures(pair([parallel(0), parallel(1)]))
    assert found.near_promises == 0.5
    assert found.promised_ratio == pytest.approx(60 / 50)
    assert found.buckets == {20: 0.5, 30: 0.5}
    # 20 steps of one thread, 20 of two, 10 of three.
    assert found.threads == pytest.approx(90 / 50)


def test_a_faster_run_is_faster_beyond_doubt_because_the_draws_are_paired() -> None:
    chance = np.random.default_rng(0).normal(0, 1, 60)
    slow, fast = geometric(chance), geometric(chance + math.log(1.1))
    assert slow.interval().high > fast.interval().value  # type: ignore[operator]
    ratio = fast.over(slow).interval()
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.1] * 3)


def test_a_part_of_the_prompts_has_its_own_interval() -> None:
    found = geometric(np.log([2.0, 2.0, 8.0, 8.0]), [True, True, False, False]).interval()
    assert [found.value, found.low, found.high] == pytest.approx([2.0] * 3)


def test_a_resample_of_nothing_does_not_count() -> None:
    found = drawn([(1.0, 1.0), (0.0, 0.0)], lambda sums: sums[..., 0] / sums[..., 1])
    assert np.isnan(found.draws_R).any()
    assert found.interval().low == 1


def test_the_baseline_against_itself_is_one() -> None:
    base = [record(0), record(1, plain_tokens=37, critical_path=37)]
    found = figures(pair([replace(one) for one in base], base))
    assert found.speedups["theoretical"].value == pytest.approx(1)


def test_speedups_are_told_apart_by_which_answers_ended() -> None:
    ours = [parallel(0), parallel(1, hit_limit=True), parallel(2, critical_path=25), failed(3)]
    base = [record(0), record(1), record(2, hit_limit=True), record(3, hit_limit=True)]
    found = figures(pair(ours, base)).by_end
    assert {name: one.prompts for name, one in found.items()} == {
        "both ended": 1,
        "none ended": 1,
        "only the baseline's ended": 1,
        "only the run's ended": 1,
    }
    assert found["both ended"].speedups["own"].value == pytest.approx(2)
    assert found["only the run's ended"].speedups["own"].value == pytest.approx(4)


def test_texts_are_looked_at_for_empty_items_and_repetition() -> None:
    found = figures(
        pair([record(0, text="1. 1. 1."), record(1, text="a b c d a b c d"), failed(2)])
    )
    assert found.empty_scaffolds.value == pytest.approx(1 / 3)
    assert found.rep_4 == pytest.approx(0.1)


def test_topics_that_every_prompt_gets_are_counted_over_the_whole_run() -> None:
    """All four answers promise "diet" and "sleep"; one prompt asks about sleep."""
    ours = [parallel(number) for number in range(3)]
    ours.append(replace(parallel(3), instruction="What about sleep?"))
    assert figures(pair(ours)).stock_topics == 7 / 8
