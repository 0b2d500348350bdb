"""Our family against rivals: at their speed, and at their quality."""

from __future__ import annotations

import numpy as np

from pasta_decoding.evaluation.bootstrap import Drawn
from pasta_decoding.evaluation.report.dominance import Contender, dominance


def contender(
    label: str, method: str, speed: float, quality: float, spread: float = 0
) -> Contender:
    draws = np.linspace(-spread, spread, 1001)
    return Contender(
        label, method, Drawn(speed, np.full(1001, speed)), Drawn(quality, quality + draws)
    )


def rows(*contenders: Contender) -> list[tuple[str, str | None, bool]]:
    return [(row.at, row.ours, row.holds) for row in dominance(contenders)]


SOT = contender("sot", "sot", 1.5, 40)
FAST, GOOD = contender("fast", "pasta", 1.9, 42), contender("good", "pasta", 1.2, 52)


def test_a_family_that_is_faster_and_better_dominates() -> None:
    assert rows(SOT, FAST, GOOD) == [("speed", "fast", True), ("quality", "fast", True)]


def test_a_family_that_is_slower_everywhere_does_not_dominate() -> None:
    slow = contender("slow", "pasta", 1.3, 45)
    assert rows(SOT, slow) == [("speed", None, False), ("quality", "slow", False)]


def test_a_quality_lower_by_less_than_its_interval_is_as_good() -> None:
    close = contender("close", "pasta", 1.9, 39)
    assert rows(SOT, close) == [("speed", "close", False), ("quality", None, False)]
    wide = contender("close", "pasta", 1.9, 39, spread=3)
    assert rows(SOT, wide)[0] == ("speed", "close", True)


def test_runs_without_a_rival_have_no_rows() -> None:
    assert dominance([FAST, GOOD]) == []
