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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.request import Priority

GRID = (1, *(unit << power for power in range(11) for unit in (2, 3)))
"""Widths with a cost of their own; a width between two counts as the larger one."""
BACKGROUND_STEPS = 4
"""A background answer advances at least once in this many steps."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """Which threads of one answer can write in a step, in reading order."""

    threads: Sequence[int]
    priority: Priority = Priority.normal


SAMPLES = 9
"""This many steps of a width are kept."""
ENOUGH = 3
"""This many make its figure worth something: the first may pay for what later ones find ready."""


@dataclass(slots=True)
class StepCost:
    """What a step takes, by width: the median of the last few, for each thread.

    stale_steps: after how many steps of other widths one is to be seen again.
    """

    stale_steps: int = 512
    _thread_s: dict[int, deque[float]] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    def add(self, width: int, seconds: float) -> None:
        self._steps += 1
        self._seen[on_grid(width)] = self._steps
        samples = self._thread_s.setdefault(on_grid(width), deque(maxlen=SAMPLES))
        samples.append(seconds / width)

    def seconds(self, width: int) -> float | None:
        """Return what a step of `width` takes; None if too few were seen."""
        samples = self._thread_s.get(on_grid(width), ())
        return median(samples) * width if len(samples) >= ENOUGH else None

    def unsure(self, widths: Sequence[int]) -> int | None:
        """Return one of `widths` of which too little is known, or nothing recent; else None."""
        for width in widths:
            if self.seconds(width) is None:
                return width
            if self._steps - self._seen[on_grid(width)] > self.stale_steps:
                return width
        return None


def on_grid(width: int) -> int:
    """Return the width as which `width` counts."""
    return next((one for one in GRID if one >= width), width)


@dataclass(slots=True)
class SchedulingPolicy:
    """Decides before each step, and learns from it: the width at which a token is cheapest.

    target_s: a step takes no longer where fewer threads make it so; None sets no goal.
    worth:    how much cheaper a token has to be for a wider step to be taken.
    """

    target_s: float | None = None
    worth: float = 0.02
    costs: StepCost = field(default_factory=StepCost)
    _steps: int = 0

    def choose(self, answers: Sequence[Runnable]) -> list[Sequence[int]]:
        """Return which threads advance: of each answer the first of its runnable ones."""
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
        """Note what a step of `width` threads took."""
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
    if not extra:
        return shares
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
    interpreter: Interpreter, order: Sequence[int], quota: Quota, begun: int
) -> Sequence[int]:
    """Return which threads can write next.

    order: threads that have a token to be fed, in reading order.
    begun: threads that have begun and not ended.
    """
    if len(order) < 2:
        return order
    if begun >= quota.threads and interpreter.in_topic(MAIN):  # main may begin a thread too many
        order = [thread for thread in order if thread != MAIN]
    if len(order) > 1 and not _is_safe(interpreter, quota.ahead_tokens, main=MAIN in order[1:]):
        budget = interpreter.budget
        ahead = budget.written_tokens - budget.place(order[0])
        order = order[: 1 + max(0, (quota.ahead_tokens - ahead) // MOST_A_CHOICE)]
    return order[: interpreter.rules.max_threads]


def _is_safe(interpreter: Interpreter, ahead_tokens: int, *, main: bool) -> bool:
    """Is there room for all that has begun to come to its own limits?"""
    budget = interpreter.budget
    coming = budget.most_to_come()
    if main:
        coming += MOST_A_CHOICE
        longest = max(interpreter.vocabulary.control.promise_close)
        coming += budget.most_of_a_chunk(longest) if interpreter.in_topic(MAIN) else 0
    return budget.written_tokens + coming <= interpreter.rules.max_tokens + ahead_tokens
