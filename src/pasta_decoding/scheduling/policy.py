"""Who writes in a step: which threads of an answer could, and which of all answers do.

The text does not depend on when a thread writes, so width is chosen by its cost. An answer alone
advances all its threads. Of many, each advances its earliest unfinished text, and as many more
threads as make a token cheapest by what steps have cost. A background answer advances in every
fourth step.

Prompt tokens make the pass of the threads longer. That time is paid from a budget to which each
step adds a share of what it takes with threads alone. So a long prompt slows a stream next to it by
a known factor. What a text join reads again is fed like a prompt.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pasta_decoding.answer.request import Priority

GRID = (1, *(unit << power for power in range(11) for unit in (2, 3)))
"""Widths with a cost of their own; a width between two counts as the larger one."""
BACKGROUND_STEPS = 4
"""A background answer advances at least once in this many steps."""


@dataclass(frozen=True, slots=True)
class RunnableThreads:
    """Which threads of one answer can write in a step, in reading order."""

    threads: Sequence[int]
    priority: Priority = Priority.normal


SAMPLES = 9
"""This many steps of a width are kept."""
ENOUGH = 3
"""This many make its figure worth something: the first may pay for what later ones find ready."""
STALE_STEPS = 512
"""After this many steps of other widths one is to be seen again."""
WORTH = 0.02
"""How much cheaper a token has to be for a wider step to be taken."""


@dataclass(slots=True)
class StepCost:
    """What a step takes, by width: the median of the last few, for each thread."""

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
        oldest = self._steps - STALE_STEPS
        for width in widths:
            if self.seconds(width) is None or self._seen[on_grid(width)] < oldest:
                return width
        return None


def on_grid(width: int) -> int:
    return next((one for one in GRID if one >= width), width)


MAX_SHARE = 0.6
"""Of the time of steps in which threads write, on average, this much is for prompt tokens."""
LEAST_TOKENS = 4
"""Fewer are not fed in a step of threads, while there are more: a pass for them would not pay."""
LEAST_SHARE = 24
"""However many threads write, 1 / LEAST_SHARE of a step's most tokens may be of prompts."""
DEBT_STEPS = 8
"""At most this many steps pay for one slow pass, which may never come again."""
MOST_STEPS = 16
"""After this many steps without prompt tokens some are fed, whatever they cost."""


@dataclass(slots=True)
class SchedulingPolicy:
    """Decides before each step which threads write and how many prompt tokens are fed.

    It learns from each: the width at which a token is cheapest, and what prompt tokens cost.

    target_s: a step takes no longer where fewer threads make it so; None sets no goal.
    """

    target_s: float | None = None
    costs: StepCost = field(default_factory=StepCost)
    _steps: int = 0
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _tokens: deque[int] = field(default_factory=lambda: deque((LEAST_TOKENS,), maxlen=5))
    _budget_s: float = 0.0
    _steps_without: int = 0

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        """Return which threads advance: of each answer the first of its runnable ones."""
        self._steps += 1
        hurried = any(one.threads and one.priority > Priority.low for one in answers)
        low_waits = hurried and self._steps % BACKGROUND_STEPS != 0
        most = [
            0 if low_waits and one.priority is Priority.low else len(one.threads) for one in answers
        ]
        least = [
            wanted if one.priority is Priority.high else min(1, wanted)
            for one, wanted in zip(answers, most, strict=True)
        ]
        width = self.width(sum(least), sum(most), alone=len(answers) == 1)
        shares = share_width(width - sum(least), least, most, answers)
        return [one.threads[:share] for one, share in zip(answers, shares, strict=True)]

    def prompt_tokens(self, width: int, most_tokens: int) -> int:
        """Return how many prompt tokens go into a step of `width` threads. Call it once a step.

        most_tokens: of a step, those of threads included.
        """
        if not width:
            return most_tokens
        token_s = median(self._token_s) if self._token_s else 0.0
        self._top_up(width, token_s)
        # A step of prompt tokens does not tell what threads take alone.
        unsure = self.costs.unsure([width]) is not None
        if unsure or self._budget_s < LEAST_TOKENS * token_s:
            return LEAST_TOKENS if self._steps_without >= MOST_STEPS else 0
        least = max(LEAST_TOKENS, most_tokens // LEAST_SHARE)
        wanted = min(max(least, most_tokens - width), 2 * max(self._tokens))
        return wanted if wanted * token_s <= self._budget_s else int(self._budget_s / token_s)

    def _top_up(self, width: int, token_s: float) -> None:
        """Add to the budget what a step of threads pays; it holds little more than one step's."""
        if (alone_s := self.costs.seconds(width)) is None:
            return
        share_s = MAX_SHARE / (1 - MAX_SHARE) * alone_s
        most_s = share_s + LEAST_TOKENS * token_s
        self._budget_s = max(-DEBT_STEPS * share_s, min(self._budget_s + share_s, most_s))

    def learn(self, width: int, seconds: float, prompt_tokens: int = 0) -> None:
        self._steps_without = 0 if prompt_tokens else self._steps_without + 1
        if not prompt_tokens:
            self.costs.add(width, seconds)
            return
        alone_s = self.costs.seconds(width) if width else 0.0
        if alone_s is None:
            return
        more_s = max(0.0, seconds - alone_s)
        self._token_s.append(more_s / prompt_tokens)
        if width:
            self._budget_s -= more_s
            self._tokens.append(max(LEAST_TOKENS, prompt_tokens))

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
        return next(w for w in widths if seconds[w] / w <= cheapest * (1 + WORTH))


def share_width(
    extra: int, least: Sequence[int], most: Sequence[int], answers: Sequence[RunnableThreads]
) -> list[int]:
    """Return how many threads of each answer advance: `least`, and `extra` more among all.

    The extra ones go round, one an answer and turn, those of high priority and the oldest first.
    """
    turns = sorted(
        (turn, -answers[place].priority, place)
        for place in range(len(answers))
        for turn in range(most[place] - least[place])
    )
    given = Counter(place for _, _, place in turns[:extra])
    return [share + given[place] for place, share in enumerate(least)]


def share_out(wanted: Sequence[int], tokens: int) -> list[int]:
    """Return how many of `tokens` each prompt gets that still needs `wanted`, the oldest first.

    The shortest first, so that nobody waits for a long one; but the oldest has half of them.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    left = tokens
    if order and order[0] != 0:
        shares[0] = min(wanted[0], -(-tokens // 2))
        left -= shares[0]
    for place in order:
        more = min(wanted[place] - shares[place], left)
        shares[place] += more
        left -= more
    return shares
