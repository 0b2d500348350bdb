"""Who writes in a step: which threads of an answer could, and which of all answers do.

When a thread writes changes nothing that anybody reads, so width is bought where it pays. An answer
alone advances all its threads. Where many are written together each advances at least one, the
earliest unfinished text first, and as many more as make a token cheapest by what steps have been
seen to cost. Nobody waits for ever: an answer with a runnable thread advances in every step, a
background answer in every fourth.

Threads that would need more slots or branches than the answer's quota wait. Threads that would
probably write beyond the answer's budget, to be trimmed, are told apart. The first unfinished text
is always runnable, so in the end everything has its turn.
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
"""Widths that are told apart; those between are taken for the next larger one."""
BACKGROUND_STEPS = 4
"""A background answer advances in one step of so many, at least."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """Who of one answer can write in a step, and how many cannot.

    threads:  those that can, in reading order.
    likely:   how many of them, the first ones, will probably not be trimmed; None: all.
    for_room, for_thread: how many wait because there is no room to write so far ahead, or because
        no more threads may begin.
    """

    threads: Sequence[int]
    likely: int | None = None
    priority: Priority = Priority.normal
    for_room: int = 0
    for_thread: int = 0


class SchedulingPolicy(Protocol):
    """Decides before each step, and learns from it."""

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        """Return who advances, of each answer some of those that are ready.

        Every answer must have its turn in the end, the first that is ready of it among them.
        """
        ...

    def learn(self, width: int, seconds: float) -> None:
        """Hear what a step of `width` threads took."""
        ...


class EveryThread:
    """Everybody advances: the fewest steps an answer."""

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        return [answer.threads for answer in answers]

    def learn(self, width: int, seconds: float) -> None:
        pass


class ReadingOrder:
    """One thread an answer: the order in which a reader wants it, and the narrowest steps."""

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        return [answer.threads[:1] for answer in answers]

    def learn(self, width: int, seconds: float) -> None:
        pass


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
        waiting = self._in_background(answers)
        alone = len(answers) == 1
        wanted = [len(one.threads) if alone else _likely(one) for one in answers]
        least = [0 if waits else _least(one) for one, waits in zip(answers, waiting, strict=True)]
        most = [0 if waits else want for want, waits in zip(wanted, waiting, strict=True)]
        narrow, wide = sum(least), sum(most)
        width = self.width(narrow, wide, alone=alone)
        shares = share_out(width - narrow, least, most, answers)
        return [one.threads[:share] for one, share in zip(answers, shares, strict=True)]

    def learn(self, width: int, seconds: float) -> None:
        self.costs.add(width, seconds)

    def _in_background(self, answers: Sequence[Runnable]) -> list[bool]:
        """Say who waits in this step for those that are in a hurry."""
        hurried = any(one.threads and one.priority > Priority.low for one in answers)
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


def _least(answer: Runnable) -> int:
    """Return how many of its threads advance whatever that costs."""
    return _likely(answer) if answer.priority is Priority.high else min(1, len(answer.threads))


def _likely(answer: Runnable) -> int:
    return len(answer.threads) if answer.likely is None else answer.likely


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
    opening: int | None,
    quota: Quota,
    begun: int,
    priority: Priority,
) -> Runnable:
    """Tell who can write next.

    order:   threads that have a token to be fed. Main comes last, but before the chunk that this
             token opens:
    opening: that chunk.
    begun:   threads that have begun and not ended.
    """
    if len(order) < 2:
        return Runnable(order, len(order), priority)
    served = _with_a_thread(order, interpreter, begun < quota.threads)
    safe = _with_room(served, interpreter, quota.ahead_tokens)
    threads = safe[: interpreter.rules.max_threads]
    likely = _likely_threads(threads, interpreter, opening)
    for_room = len(served) - len(safe)
    return Runnable(threads, likely, priority, for_room, len(order) - len(threads) - for_room)


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


def _likely_threads(order: Sequence[int], interpreter: Interpreter, opening: int | None) -> int:
    """Count the first, and those that stand within the budget if chunks are as long as promised."""
    budget = interpreter.rules.max_tokens
    if interpreter.budget.expected_place() < budget:
        return len(order)
    places = [(opening if thread == MAIN and opening else thread) for thread in order[1:]]
    return 1 + sum(interpreter.budget.expected_place(thread) < budget for thread in places)


def _is_safe(interpreter: Interpreter, ahead_tokens: int, *, main: bool) -> bool:
    """Is there room for all that has begun to come to its own limits?"""
    budget = interpreter.budget
    coming = budget.most_to_come()
    if main:
        coming += MOST_A_CHOICE
        longest = max(interpreter.vocabulary.control.promise_close)
        coming += budget.most_of_a_chunk(longest) if interpreter.in_topic(MAIN) else 0
    return budget.written_tokens + coming <= interpreter.rules.max_tokens + ahead_tokens
