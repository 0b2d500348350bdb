"""Bars: they move within rows, and never back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from pasta_decoding.cli.bars import RowsBar, counting, progress

THIRD = 1 / 3


def test_a_bar_over_rows_moves_within_those_that_are_worked_on_together() -> None:
    with RowsBar("annotating", 4) as bar:
        for _ in range(6):
            bar.part(THIRD)
        assert abs(bar.completed - 2) < 1e-9
        bar.row()
        bar.row()
        assert abs(bar.completed - 2) < 1e-9
        bar.row()
        bar.row()
        assert bar.completed == 4


@given(st.lists(st.sampled_from(["row", "part"]), max_size=40))
def test_it_never_moves_back_and_not_beyond_its_end(moves: list[str]) -> None:
    bar = RowsBar("annotating", 5)
    before = 0.0
    for move in moves:
        if move == "row":
            bar.row()
        else:
            bar.part(THIRD)
        assert before - 1e-9 <= bar.completed <= 5
        before = bar.completed


def test_a_bar_is_moved_by_what_it_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []

    def noted() -> Progress:
        bars.append(counting())
        return bars[0]

    monkeypatch.setattr("pasta_decoding.cli.bars.counting", noted)
    with progress("rating", 2) as tick:
        tick()
        assert bars[0].tasks[0].completed == 1
        tick()
        assert bars[0].finished
