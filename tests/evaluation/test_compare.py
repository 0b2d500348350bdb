"""Comparing two checkpoints, on records whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import interval
from pasta_decoding.evaluation.compare import compare, paired
from pasta_decoding.evaluation.records import Record


def record(number: int, **fields: object) -> Record:
    plain = {"plain_tokens": 100, "critical_path": 50, "chunks": 4, "promises": [(20, 20)] * 4}
    return Record(str(number), f"prompt {number}", **plain | fields)  # type: ignore[arg-type]


FIRST = [record(n) for n in range(20)]


def test_a_faster_checkpoint_is_faster_beyond_doubt() -> None:
    found = compare(paired(FIRST, [record(n, critical_path=40 + n % 3) for n in range(20)]))
    speed = found["own_speedup"]
    assert speed["first"] == pytest.approx(2.0)
    assert speed["ratio"]["value"] == pytest.approx(speed["second"] / 2)
    assert 1.15 < speed["ratio"]["low"] < speed["ratio"]["value"] < speed["ratio"]["high"] < 1.26
    assert speed["ratio"]["excludes_no_change"]


def test_what_goes_up_and_down_alike_is_no_change() -> None:
    second = [record(n, critical_path=40 if n % 2 else 62) for n in range(20)]
    assert not compare(paired(FIRST, second))["own_speedup"]["ratio"]["excludes_no_change"]


def test_lengths_are_compared_where_both_answers_ended() -> None:
    second = [record(n, plain_tokens=50 if n else 400, hit_limit=n == 0) for n in range(20)]
    found = compare(paired(FIRST, second))
    assert (found["plain_tokens_finished"]["of"], found["plain_tokens_finished"]["second"]) == (
        19,
        50,
    )
    assert found["hit_limit"]["difference"]["value"] == pytest.approx(0.05)


def test_shares_are_of_all_chunks_and_promises_together() -> None:
    second = [record(n, repeated_chunks=2 * (n < 10), near_promises=3) for n in range(20)]
    found = compare(paired(FIRST, second))
    assert (found["repeated_chunks"]["first"], found["repeated_chunks"]["second"]) == (0, 0.25)
    assert found["near_promises"]["difference"]["value"] == pytest.approx(0.75)
    assert compare(paired([record(1, chunks=0)], [record(1)]))["repeated_chunks"] is None


def test_quality_is_a_paired_difference() -> None:
    quality = {f"prompt {n}": (-2.0 - n, -1.9 - n) for n in range(20)}
    found = compare(paired(FIRST, FIRST), quality)["quality"]["difference"]
    assert [found[key] for key in ("value", "low", "high")] == pytest.approx([0.1] * 3)
    assert found["excludes_no_change"]


def test_a_failed_answer_is_counted_and_left_out() -> None:
    second = [record(n, error="broken" if n == 3 else None) for n in range(20)]
    assert compare(paired(FIRST, second))["failures"] == 1


def test_other_prompts_are_refused() -> None:
    with pytest.raises(PastaError, match="2 prompts are in one file only, such as 'prompt 19'"):
        paired(FIRST, [*FIRST[:-1], record(20)])


def test_the_interval_of_a_mean_is_two_standard_errors_wide() -> None:
    values = np.random.default_rng(1).normal(size=(400, 1))
    found = interval(values, lambda sums: sums[..., 0] / 400)
    assert found.value == pytest.approx(values.mean())
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(4 * values.std() / 20, rel=0.1)
    assert not found.excludes(0)
