"""The data in the repository is what its page says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pasta_decoding.data.dataset import Row, is_held_out, read_rows
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Sync, read

FOLDER = Path(__file__).parents[2] / "data"
ROWS = {"annotated_clean": 1233, "annotated_written": 716, "training_sample": 200}


def shipped(name: str) -> list[Row]:
    return list(read_rows(FOLDER / f"{name}.jsonl.gz"))


@pytest.mark.parametrize(("name", "count"), ROWS.items())
def test_every_row_is_there_and_well_formed(name: str, count: int) -> None:
    rows = shipped(name)
    assert len(rows) == count
    assert [row.id for row in rows if check(row.response)] == []


def test_the_training_sample_holds_nothing_that_is_for_judging() -> None:
    held_out = {row.id for row in shipped("annotated_clean") if is_held_out(row.id)}
    assert len(held_out) == 296
    assert held_out.isdisjoint(row.id for row in shipped("training_sample"))


def test_each_part_of_the_written_rows_has_the_tags_that_its_source_says() -> None:
    found = Counter(
        (
            row.source,
            any(isinstance(n, Chunk) for n in tree),
            sum(isinstance(n, Sync) for n in tree),
        )
        for row in shipped("annotated_written")
        for tree in [read(row.response)]
    )
    assert found == {
        ("written/sync", True, 1): 260,
        ("written/parts", True, 0): 295,
        ("written/plain", False, 0): 161,
    }
