"""Bars on standard error."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from pasta_decoding.cli.bars import counting, progress


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
