"""The figures of a training set, from rows small enough to count by hand."""

from __future__ import annotations

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.report import measure_rows


def count_words(text: str) -> int:
    return len(text.split())


def chunk(words: int) -> str:
    return f'<promise topic="a" tokens="20"/><async>{" ".join(["w"] * words)}</async>'


def test_a_set_is_described_as_a_whole_and_by_the_first_word_of_its_sources() -> None:
    rows = [
        Row("1", "a/x", "Why not?", f"{chunk(30)} {chunk(30)}<sync/> So."),
        Row("2", "a/y", "Why?", "So it is."),
        Row("3", "b", "Why?", "So."),
    ]
    found = measure_rows(rows, count_words)
    assert (found["rows"], found["with_chunk"], found["chunks"], found["syncs"]) == (3, 1, 2, 1)
    assert found["plain_tokens"] == {"sum": 65, "mean": 21.7, "p10": 1.4, "p50": 3.0, "p90": 49.4}
    assert found["chunk_tokens"]["mean"] == 30
    assert list(found["sources"]) == ["a", "b"]
    assert found["sources"]["b"]["ideal_speedup"] == 1.0
    assert found["sources"]["a"]["ideal_speedup_with_chunk"] == round(61 / 42, 3)
