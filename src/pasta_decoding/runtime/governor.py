"""Which threads write in the next step: policy, fed by what steps have been seen to cost.

When a thread writes changes nothing that anybody reads, so width is bought where it pays. An answer
alone advances all its threads. Where many are written together each advances at least one, the
earliest unfinished text first, and so many more as make a token cheapest. Nobody waits for ever:
who has threads ready advances in every step, background answers in every fourth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from pasta_decoding.runtime.request import Priority

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Widths that are told apart; those between are taken for the next larger one."""
BACKGROUND_STEPS = 4
"""A background answer advances in one step of so many, at least."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One answer before a step.

    ready:  threads that can advance, in reading order.
    likely: how many of them, the first ones, will probably not be trimmed; None: all.
    """

    ready: Sequence[int]
    likely: int | None = None
    priority: Priority = Priority.normal


class Governor(Protocol):
    """Decides before each step, and learns from it."""

    def choose(self, answers: Sequence[Standing]) -> list[Sequence[int]]:
        """Return who advances, of each answer some of those that are ready.

        Every answer must have its turn in the end, the first that is ready of it among them.
        """
        ...

    def learn(self, width: int, seconds: float) -> None:
        """Hear what a step of `width` threads took."""
        ...


class Eager:
    """Everybody advances: the fewest steps an answer."""

    def choose(self, answers: Sequence[Standing]) -> list[Sequence[int]]:
        """See `Governor`."""
        return [answer.ready for answer in answers]

    def learn(self, width: int, seconds: float) -> None:
        """See `Governor`."""


class InReadingOrder:
    """One thread an answer: the order in which a reader wants it, and the narrowest steps."""

    def choose(self, answers: Sequence[Standing]) -> list[Sequence[int]]:
        """See `Governor`."""
        return [answer.ready[:1] for answer in answers]

    def learn(self, width: int, seconds: float) -> None:
        """See `Governor`."""


@dataclass(slots=True)
class StepCosts:
    """What a thread of a step has been seen to take, by width: the median of the last few.

    samples: how many of a width are kept,
    enough:  and how many make its figure worth something. The first step of a width may pay for
             what later ones find ready.
    stale_steps: after how many steps of other widths it is to be seen again.
    """

    samples: int = 9
    enough: int = 3
    stale_steps: int = 512
    _seconds: dict[int, deque[float]] = field(default_factory=dict)
    _medians: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    def add(self, width: int, seconds: float) -> None:
        """Note a step."""
        self._steps += 1
        kept = self._seconds.setdefault(on_grid(width), deque(maxlen=self.samples))
        kept.append(seconds / width)
        self._medians[on_grid(width)] = median(kept)
        self._seen[on_grid(width)] = self._steps

    def seconds(self, width: int) -> float | None:
        """Return what a step of `width` takes; None if too few were seen."""
        known = self._is_known(on_grid(width))
        return self._medians[on_grid(width)] * width if known else None

    def unsure(self, widths: Sequence[int]) -> int | None:
        """Return one of `widths` of which too little is known, or nothing recent; else None."""
        for width in widths:
            if not self._is_known(on_grid(width)) or self._is_stale(on_grid(width)):
                return width
        return None

    def _is_known(self, width: int) -> bool:
        return len(self._seconds.get(width, ())) >= self.enough

    def _is_stale(self, width: int) -> bool:
        return self._steps - self._seen[width] > self.stale_steps


def on_grid(width: int) -> int:
    """Return the width as which `width` counts."""
    place = bisect_left(GRID, width)
    return GRID[place] if place < len(GRID) else width


@dataclass(slots=True)
class CheapestStep:
    """The governor: as wide as makes a token cheapest, as narrow as a latency goal asks.

    target_s: a step takes no longer where fewer threads make it so; None sets no goal.
    worth:    how much cheaper a token has to be for a wider step to be taken.
    """

    target_s: float | None = None
    worth: float = 0.02
    costs: StepCosts = field(default_factory=StepCosts)
    _steps: int = 0

    def choose(self, answers: Sequence[Standing]) -> list[Sequence[int]]:
        """See `Governor`."""
        self._steps += 1
        waiting = self._in_background(answers)
        alone = len(answers) == 1
        wanted = [len(one.ready) if alone else _likely(one) for one in answers]
        least = [0 if waits else _least(one) for one, waits in zip(answers, waiting, strict=True)]
        most = [0 if waits else want for want, waits in zip(wanted, waiting, strict=True)]
        narrow, wide = sum(least), sum(most)
        width = self.width(narrow, wide, alone=alone)
        shares = share_out(width - narrow, least, most, answers)
        return [one.ready[:share] for one, share in zip(answers, shares, strict=True)]

    def learn(self, width: int, seconds: float) -> None:
        """See `Governor`."""
        self.costs.add(width, seconds)

    def _in_background(self, answers: Sequence[Standing]) -> list[bool]:
        """Say who waits in this step for those that are in a hurry."""
        hurried = any(one.ready and one.priority > Priority.low for one in answers)
        if not hurried or self._steps % BACKGROUND_STEPS == 0:
            return [False] * len(answers)
        return [one.priority is Priority.low for one in answers]

    def width(self, narrow: int, wide: int, *, alone: bool) -> int:
        """Return how many of `wide` threads write, `narrow` of them whatever that costs."""
        if narrow == wide or (alone and self.target_s is None):
            return wide
        return self._best(widths_between(max(1, narrow), wide), alone=alone)

    def _best(self, widths: Sequence[int], *, alone: bool) -> int:
        unsure = self.costs.unsure(widths)
        if unsure is not None:
            return unsure
        seconds = {width: self.costs.seconds(width) or 0.0 for width in widths}
        if self.target_s is not None:
            fast = [width for width in widths if seconds[width] <= self.target_s]
            widths = fast or widths[:1]
        if alone:
            return widths[-1]
        cheapest = min(seconds[width] / width for width in widths)
        return next(w for w in widths if seconds[w] / w <= cheapest * (1 + self.worth))


def widths_between(narrow: int, wide: int) -> list[int]:
    """Return the widths that are worth telling apart from `narrow` to `wide`, both among them."""
    between = [width for width in GRID if narrow < width < wide]
    return [narrow, *between, wide]


def share_out(
    extra: int, least: Sequence[int], most: Sequence[int], answers: Sequence[Standing]
) -> list[int]:
    """Return how many threads of each answer advance: `least`, and `extra` more among all.

    The extra ones go round, one an answer and turn, those of high priority and the oldest first.
    """
    shares = list(least)
    order = sorted(range(len(answers)), key=lambda place: -answers[place].priority)
    while extra > 0:
        takers = [place for place in order if shares[place] < most[place]][:extra]
        assert takers, "no wider than all that are ready"
        for place in takers:
            shares[place] += 1
        extra -= len(takers)
    return shares


def _least(answer: Standing) -> int:
    """Return how many of its threads advance whatever that costs."""
    return _likely(answer) if answer.priority is Priority.high else min(1, len(answer.ready))


def _likely(answer: Standing) -> int:
    return len(answer.ready) if answer.likely is None else answer.likely
