"""Is one of our runs at least as good as a rival at its speed, and as fast at its quality?

Both are paired over prompts. At the rival's speed: of our runs that are at least as fast, the best;
it is at least as good unless its quality is lower beyond the interval. At the rival's quality: of
our runs that are at least as good, the fastest; as fast unless it is slower beyond the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.evaluation.bootstrap import Drawn, Interval

RIVALS = ("sot", "apar", "lookup")
OURS = "pasta"


@dataclass(frozen=True, slots=True)
class Contender:
    """A run with its speedup and its quality by one measure."""

    label: str
    method: str
    speed: Drawn
    quality: Drawn


@dataclass(frozen=True, slots=True)
class Dominance:
    """One rival against our family, at its speed or at its quality.

    ours:    the run of ours that was chosen; None if none is as fast, or as good.
    speed:   its speedup over the rival's. quality: its quality less the rival's.
    holds:   see above.
    """

    rival: str
    at: str
    ours: str | None
    speed: Interval | None
    quality: Interval | None
    holds: bool


def dominance(contenders: Sequence[Contender]) -> list[Dominance]:
    """Return two rows a rival: at its speed, and at its quality."""
    ours = [one for one in contenders if one.method == OURS]
    rivals = [one for one in contenders if one.method in RIVALS]
    return [
        row
        for rival in rivals
        for row in (_at_its_speed(rival, ours), _at_its_quality(rival, ours))
    ]


def _at_its_speed(rival: Contender, ours: Sequence[Contender]) -> Dominance:
    fast = [one for one in ours if one.speed.value >= rival.speed.value]
    best = max(fast, key=lambda one: one.quality.value, default=None)
    return _row("speed", rival, best)


def _at_its_quality(rival: Contender, ours: Sequence[Contender]) -> Dominance:
    good = [one for one in ours if one.quality.value >= rival.quality.value]
    fastest = max(good, key=lambda one: one.speed.value, default=None)
    return _row("quality", rival, fastest)


def _row(at: str, rival: Contender, chosen: Contender | None) -> Dominance:
    if chosen is None:
        return Dominance(rival.label, at, None, None, None, holds=False)
    speed = chosen.speed.over(rival.speed).interval()
    quality = chosen.quality.minus(rival.quality).interval()
    reached = {
        "speed": quality.high is not None and quality.high >= 0,
        "quality": speed.high is not None and speed.high >= 1,
    }
    return Dominance(rival.label, at, chosen.label, speed, quality, holds=reached[at])
