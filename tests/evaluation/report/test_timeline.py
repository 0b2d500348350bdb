"""Timelines that are drawn from a text: who waits for whom."""

from __future__ import annotations

import pytest

from pasta_decoding.evaluation.report.timeline import telling_sample, timeline
from tests.runfolders import failed, parallel, record


def test_chunks_run_beside_the_main_thread_until_the_sync_waits_for_the_longest() -> None:
    text = (
        'aaaaaaaaaa<promise topic="x" tokens="20"/><async>bbbbbbbbbbbbbbbbbbbb</async>'
        '<promise topic="y" tokens="20"/><async>ccccc</async><sync/>dddddddddd'
    )
    # 45 characters, 45 tokens. Promises take 5 steps each, so the chunks begin at 15 and 20.
    bars = timeline(record(0, annotated=text, plain_tokens=45))
    assert [(bar.thread, bar.start, bar.end) for bar in bars] == [
        (0, 0, 20),
        (0, 35, 46),  # SYNC is a step, too
        (1, 15, 35),
        (2, 20, 25),
    ]
    assert [bar.label for bar in bars] == ["", "", "x", "y"]


def test_an_answer_without_chunks_is_one_bar() -> None:
    [bar] = timeline(record(0))
    assert (bar.thread, bar.start) == (0, 0)
    assert bar.end == pytest.approx(100)


def test_the_sample_is_the_median_of_those_with_chunks_and_no_failure() -> None:
    fast = [parallel(n, chunks=3, critical_path=10 * (n + 1)) for n in range(3)]
    assert telling_sample([record(9), failed(8), *fast]) == fast[1]
    assert telling_sample([record(9), failed(8)]) is None
