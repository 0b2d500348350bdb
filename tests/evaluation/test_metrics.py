"""Speedups, shares and intervals by hand. Failures count in all of them."""

import math
from pathlib import Path

import numpy as np
import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.metrics import Figures, mean, measure_run
from pasta_decoding.evaluation.records import Record, RunFolder
from tests.evaluation.runfolders import failed, parallel, record


def run_of(method: str, records: list[Record]) -> RunFolder:
    settings = {"method": method, "max_tokens": 400}
    return RunFolder(Path(method), settings, {answer.id: answer for answer in records})


def figures_of(ours: list[Record], theirs: list[Record] | None = None) -> Figures:
    baseline = theirs or [record(number) for number in range(len(ours))]
    return measure_run(run_of("pasta", ours), run_of("sequential", baseline))


def test_an_interval_is_that_of_the_normal_distribution_where_there_are_many_prompts() -> None:
    values_P = np.random.default_rng(0).normal(3.0, 2.0, 400)
    interval = mean(values_P)
    error = 1.96 * values_P.std() / 20
    assert interval.low == pytest.approx(values_P.mean() - error, abs=0.03)
    assert interval.high == pytest.approx(values_P.mean() + error, abs=0.03)


def test_speedups_are_geometric_means_of_each_prompts_ratio() -> None:
    speedups = figures_of([parallel(0, critical_path=50), parallel(1, critical_path=25)]).speedups
    # Of 100 tokens: 2 and 4 times, so the root of 8.
    assert speedups["tokens_per_step"].value == pytest.approx(math.sqrt(8))
    assert speedups["speedup_in_steps"].value == pytest.approx(math.sqrt(8))
    shorter = parallel(0, plain_tokens=60, critical_path=30)
    speedups = figures_of([shorter], [record(0, plain_tokens=300)]).speedups
    assert speedups["tokens_per_step"].value == pytest.approx(2)
    assert speedups["speedup_in_steps"].value == pytest.approx(10), "the baseline's tokens count"


def test_a_failed_request_counts_with_its_whole_budget() -> None:
    base = [record(number, turns="t") for number in range(2)]
    figures = figures_of([parallel(0, turns="t", seconds=5.0), failed(1, turns="t")], base)
    assert (figures.prompts, figures.failures) == (2, 1)
    assert figures.speedups["tokens_per_step"].value == pytest.approx(math.sqrt(2 * 1))
    # 400 steps for the baseline's 100 tokens, 60 seconds for its 10.
    assert figures.speedups["speedup_in_steps"].value == pytest.approx(math.sqrt(2 / 4))
    assert figures.speedups["wall_clock"].value == pytest.approx(math.sqrt(2 * 10 / 60))


def test_a_prompt_without_a_baseline_has_no_ratio_and_is_counted() -> None:
    figures = figures_of([parallel(0), parallel(1)], [record(0), failed(1)])
    assert figures.no_baseline == 1
    assert figures.speedups["speedup_in_steps"].value == pytest.approx(2)
    assert figures.speedups["tokens_per_step"].value == pytest.approx(2)


def test_there_is_a_wall_clock_speedup_only_where_both_were_timed() -> None:
    for ours, theirs in (("t", "t"), ("t", None), (None, "t")):
        speedups = figures_of([parallel(0, turns=ours)], [record(0, turns=theirs)]).speedups
        assert ("wall_clock" in speedups) is (ours == theirs)


def test_seconds_of_other_turns_and_a_record_without_seconds_are_refused() -> None:
    with pytest.raises(PastaError, match="pasta and sequential were not timed together"):
        figures_of([parallel(0, turns="yesterday")], [record(0, turns="today")])
    with pytest.raises(PastaError, match="has no seconds"):
        figures_of([failed(0, seconds=0.0, turns="t")], [record(0, turns="t")])


def test_seams_are_shares_of_answers_and_item_counts_of_those_with_a_verdict() -> None:
    mixed = "- **Tea:** hot\n- Milk\n- Beer"
    pages = [
        parallel(0, instruction="Name two drinks.", annotated=mixed),
        parallel(1, instruction="Name three drinks.", annotated=mixed),
        record(2),
        failed(3),
    ]
    seams = figures_of(pages).seams
    assert {name: share.value for name, share in seams.items()} == {
        "mixed_markup": 0.5,
        "shared_lines": 0,
        "outer_items": 0,
        "partial_list": 0,
        "item_count": 0.5,
    }
    assert figures_of([record(0)]).seams["item_count"].value is None


def test_shares_are_of_all_answers_failures_included() -> None:
    figures = figures_of([parallel(0), record(1), failed(2), parallel(3, hit_limit=True)])
    assert figures.with_promise.value == pytest.approx(0.5)
    assert figures.hit_limit.value == pytest.approx(0.25)
    assert figures.plain_tokens.value == pytest.approx(75)
    assert (figures.chunks_mean, figures.repeated_chunks) == (1, 0)
    bad = parallel(0, interventions=3, truncated_chunks=1, repeated_chunks=2)
    figures = figures_of([bad, parallel(1)])
    assert figures.interventions_per_token == pytest.approx(3 / 200)
    assert (figures.truncated_chunks, figures.repeated_chunks) == (1 / 4, 2 / 4)
