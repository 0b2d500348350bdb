"""Who writes in a step: which threads of an answer could, and which of all answers do.

The text does not depend on when a thread writes, so width is chosen by its cost. An answer alone
advances all its threads. Where many are written together each advances at least one, the
earliest unfinished text first, and as many more as make a token cheapest by what steps have been
seen to cost. Nobody waits for ever: an answer with a runnable thread advances in every step, a
background answer in every fourth.

Threads that would need more slots or branches than the answer's quota wait. The first unfinished
text is always runnable, so in the end everything has its turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.request import Priority

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Widths with a cost of their own; a width between two counts as the larger one."""
BACKGROUND_STEPS = 4
"""A background answer advances at least once in this many steps."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """Which threads of one answer can write in a step, and how many cannot.

    threads:  those that can, in reading order.
    for_room, for_thread: how many wait because there is no room to write so far ahead, or because
        no more threads may begin.
    """

    threads: Sequence[int]
    priority: Priority = Priority.normal
    for_room: int = 0
    for_thread: int = 0


class SchedulingPolicy(Protocol):
    """Decides before each step, and learns from it."""

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        """Return which threads advance: of each answer some of its runnable ones.

        Every answer must have its turn in the end, the first that is ready of it among them.
        """
        ...

    def learn(self, width: int, seconds: float) -> None:
        """Hear what a step of `width` threads took."""
        ...


@dataclass(slots=True)
class _Seen:
    """Steps of one width: seconds a thread of the last few, their median, and the last one."""

    seconds: deque[float]
    median_s: float = 0.0
    step: int = 0


@dataclass(slots=True)
class StepCost:
    """What a thread of a step has been seen to take, by width: the median of the last few.

    samples: how many of a width are kept,
    enough:  and how many make its figure worth something. The first step of a width may pay for
             what later ones find ready.
    stale_steps: after how many steps of other widths it is to be seen again.
    """

    samples: int = 9
    enough: int = 3
    stale_steps: int = 512
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _steps: int = 0

    def add(self, width: int, seconds: float) -> None:
        """Note a step."""
        self._steps += 1
        seen = self._seen.setdefault(on_grid(width), _Seen(deque(maxlen=self.samples)))
        seen.seconds.append(seconds / width)
        seen.median_s, seen.step = median(seen.seconds), self._steps

    def seconds(self, width: int) -> float | None:
        """Return what a step of `width` takes; None if too few were seen."""
        seen = self._seen.get(on_grid(width))
        return None if seen is None or len(seen.seconds) < self.enough else seen.median_s * width

    def unsure(self, widths: Sequence[int]) -> int | None:
        """Return one of `widths` of which too little is known, or nothing recent; else None."""
        for width in widths:
            if self.seconds(width) is None:
                return width
            if self._steps - self._seen[on_grid(width)].step > self.stale_steps:
                return width
        return None


def on_grid(width: int) -> int:
    """Return the width as which `width` counts."""
    place = bisect_left(GRID, width)
    return GRID[place] if place < len(GRID) else width


@dataclass(slots=True)
class CheapestStep:
    """The policy: as wide as makes a token cheapest, as narrow as a latency goal asks.

    target_s: a step takes no longer where fewer threads make it so; None sets no goal.
    worth:    how much cheaper a token has to be for a wider step to be taken.
    """

    target_s: float | None = None
    worth: float = 0.02
    costs: StepCost = field(default_factory=StepCost)
    _steps: int = 0

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        self._steps += 1
        hurried = any(one.threads and one.priority > Priority.low for one in answers)
        low_waits = hurried and self._steps % BACKGROUND_STEPS != 0
        alone = len(answers) == 1
        least, most = [], []
        for one in answers:
            waits = low_waits and one.priority is Priority.low
            wanted = 0 if waits else len(one.threads)
            least.append(wanted if one.priority is Priority.high else min(1, wanted))
            most.append(wanted)
        width = self.width(sum(least), sum(most), alone=alone)
        shares = share_width(width - sum(least), least, most, answers)
        return [one.threads[:share] for one, share in zip(answers, shares, strict=True)]

    def learn(self, width: int, seconds: float) -> None:
        self.costs.add(width, seconds)

    def width(self, narrow: int, wide: int, *, alone: bool) -> int:
        """Return how many of `wide` threads write, `narrow` of them whatever that costs."""
        if narrow == wide or (alone and self.target_s is None):
            return wide
        narrow = max(1, narrow)
        widths = [narrow, *(width for width in GRID if narrow < width < wide), wide]
        if (unsure := self.costs.unsure(widths)) is not None:
            return unsure
        seconds = {width: self.costs.seconds(width) or 0.0 for width in widths}
        if self.target_s is not None:
            widths = [one for one in widths if seconds[one] <= self.target_s] or widths[:1]
        if alone:
            return widths[-1]
        cheapest = min(seconds[width] / width for width in widths)
        return next(w for w in widths if seconds[w] / w <= cheapest * (1 + self.worth))


def share_width(
    extra: int, least: Sequence[int], most: Sequence[int], answers: Sequence[Runnable]
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


MOST_A_CHOICE = 2
"""Tokens that one choice adds at most: PROMISE_CLOSE, and ASYNC_OPEN with it."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one answer was given beyond the least that it can be written with.

    ahead_tokens: tokens that may be written beyond its budget, to be trimmed.
    threads:      threads that may have begun and not ended, main included; at least two.
    """

    ahead_tokens: int
    threads: int


LEAST_QUOTA = Quota(ahead_tokens=0, threads=2)
"""Main, and the chunk that it waits for: an answer of any width can be written with them."""


def runnable_threads(
    interpreter: Interpreter,
    order: Sequence[int],
    quota: Quota,
    begun: int,
    priority: Priority,
) -> Runnable:
    """Return which threads can write next.

    order: threads that have a token to be fed, in reading order.
    begun: threads that have begun and not ended.
    """
    if len(order) < 2:
        return Runnable(order, priority)
    served = _with_a_thread(order, interpreter, begun < quota.threads)
    safe = _with_room(served, interpreter, quota.ahead_tokens)
    threads = safe[: interpreter.rules.max_threads]
    for_room = len(served) - len(safe)
    return Runnable(threads, priority, for_room, len(order) - len(threads) - for_room)


def _with_a_thread(order: Sequence[int], interpreter: Interpreter, another: bool) -> Sequence[int]:
    """Leave main out where its next token may begin a thread too many."""
    if another or not interpreter.in_topic(MAIN):
        return order
    return [thread for thread in order if thread != MAIN]


def _with_room(order: Sequence[int], interpreter: Interpreter, ahead_tokens: int) -> Sequence[int]:
    """Return the first, and of the others as many as have room to write ahead of it."""
    first, rest = order[0], order[1:]
    if not rest or _is_safe(interpreter, ahead_tokens, main=MAIN in rest):
        return order
    spare = ahead_tokens - (interpreter.budget.written_tokens - interpreter.budget.place(first))
    return order[: 1 + max(0, spare // MOST_A_CHOICE)]


def _is_safe(interpreter: Interpreter, ahead_tokens: int, *, main: bool) -> bool:
    """Is there room for all that has begun to come to its own limits?"""
    budget = interpreter.budget
    coming = budget.most_to_come()
    if main:
        coming += MOST_A_CHOICE
        longest = max(interpreter.vocabulary.control.promise_close)
        coming += budget.most_of_a_chunk(longest) if interpreter.in_topic(MAIN) else 0
    return budget.written_tokens + coming <= interpreter.rules.max_tokens + ahead_tokens
