"""The policy of a step: which threads write in it, and how many prompt tokens it feeds.

The text of an answer does not depend on when its threads write. So the width of a step, which is
the number of threads that write in it, is chosen by cost alone. A single answer runs all its
threads. With several answers, each runs its first unfinished thread; more threads run while they
lower the measured time per token. An answer of low priority runs in every fourth step.

Prompt tokens make a step longer. A budget pays for that time: each step adds a share of the time
that its threads take alone. So a long prompt slows the other answers by a known factor. Tokens that
a text join feeds again are prompt tokens here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pasta_decoding.answer.settings import Priority

WIDTH_GRID = (1, *(unit << power for power in range(11) for unit in (2, 3)))
"""Costs are measured for these widths. Any other width counts as the next larger one."""
BACKGROUND_STEPS = 4
"""An answer of low priority advances at least once in this many steps."""


@dataclass(frozen=True, slots=True)
class RunnableThreads:
    """The threads of one answer that may write in a step, in reading order."""

    threads: Sequence[int]
    priority: Priority = Priority.normal


MAX_SAMPLES = 9
"""The cost of a width is the median of at most this many last steps."""
MIN_SAMPLES = 3
"""With fewer steps it is unknown: the first one may pay for caches and buffers of later ones."""
STALE_STEPS = 512
"""A width that this many steps have not used is measured again."""
MIN_SAVING = 0.02
"""A wider step must make a token cheaper by this share."""


@dataclass(slots=True)
class StepCost:
    """How long steps without prompt tokens take, by width."""

    _thread_s: dict[int, deque[float]] = field(default_factory=dict)
    _last_steps: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    def add(self, width: int, seconds: float) -> None:
        grid_width = on_grid(width)
        self._steps += 1
        self._last_steps[grid_width] = self._steps
        samples = self._thread_s.setdefault(grid_width, deque(maxlen=MAX_SAMPLES))
        samples.append(seconds / width)

    def seconds(self, width: int) -> float | None:
        """Return the time of a step of `width` threads; None if it is unknown."""
        samples = self._thread_s.get(on_grid(width), ())
        if len(samples) < MIN_SAMPLES:
            return None
        return median(samples) * width

    def width_to_measure(self, widths: Sequence[int]) -> int | None:
        """Return the first of `widths` whose cost is unknown or stale; None if there is none."""
        stale_step = self._steps - STALE_STEPS
        for width in widths:
            if self.seconds(width) is None or self._last_steps[on_grid(width)] < stale_step:
                return width
        return None


def on_grid(width: int) -> int:
    """Return `width`, rounded up to WIDTH_GRID."""
    return next((grid_width for grid_width in WIDTH_GRID if grid_width >= width), width)


MAX_PROMPT_SHARE = 0.6
"""Prompt tokens take at most this share of the time of steps in which threads write, on average."""
MIN_PROMPT_TOKENS = 4
"""A step feeds at least this many tokens of a longer prompt: fewer are not worth the time."""
MIN_PROMPT_DIVISOR = 24
"""Prompts may have 1 / MIN_PROMPT_DIVISOR of a step's tokens, however many threads write."""
MAX_DEBT_STEPS = 8
"""The debt of one slow step, which may be an exception, is at most the share of this many steps."""
MAX_STEPS_WITHOUT_PROMPT = 16
"""After this many steps without prompt tokens a step feeds a few, whatever they cost."""


@dataclass(slots=True)
class SchedulingPolicy:
    """Decides before each step which threads write and how many prompt tokens are fed.

    It learns from each step: the width at which a token is cheapest, and the cost of prompt tokens.

    target_s: the longest that a step should take, if fewer threads make that possible.
    """

    target_s: float | None = None
    costs: StepCost = field(default_factory=StepCost)
    _steps: int = 0
    # Of the last steps that fed prompt tokens: the time of one, and their number.
    _prompt_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _prompt_counts: deque[int] = field(default_factory=lambda: deque([MIN_PROMPT_TOKENS], maxlen=5))
    _budget_s: float = 0.0
    _steps_without_prompt: int = 0

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        """Return the threads that write in the next step: of each answer the first ones."""
        self._steps += 1
        low_waits = self._low_priority_waits(answers)
        min_threads = []
        max_threads = []
        for answer in answers:
            runnable_count = len(answer.threads)
            if low_waits and answer.priority is Priority.low:
                runnable_count = 0
            max_threads.append(runnable_count)
            is_high = answer.priority is Priority.high
            min_threads.append(runnable_count if is_high else min(1, runnable_count))
        min_width = sum(min_threads)
        width = self.width(min_width, sum(max_threads), alone=len(answers) == 1)
        priorities = [answer.priority for answer in answers]
        counts = share_width(width - min_width, min_threads, max_threads, priorities)
        return [answer.threads[:count] for answer, count in zip(answers, counts, strict=True)]

    def _low_priority_waits(self, answers: Sequence[RunnableThreads]) -> bool:
        """Return whether answers of low priority let others go first in this step."""
        if self._steps % BACKGROUND_STEPS == 0:
            return False
        return any(answer.threads and answer.priority > Priority.low for answer in answers)

    def width(self, min_width: int, max_width: int, *, alone: bool) -> int:
        """Return the number of threads of the next step, by what each width has cost.

        alone: whether a single answer runs. It takes all threads that `target_s` allows.
        """
        if min_width == max_width or (alone and self.target_s is None):
            return max_width
        min_width = max(1, min_width)
        between = [width for width in WIDTH_GRID if min_width < width < max_width]
        widths = [min_width, *between, max_width]
        width_to_measure = self.costs.width_to_measure(widths)
        if width_to_measure is not None:
            return width_to_measure
        seconds = {width: self.costs.seconds(width) or 0.0 for width in widths}
        if self.target_s is not None:
            in_time = [width for width in widths if seconds[width] <= self.target_s]
            widths = in_time or [min_width]
        if alone:
            return widths[-1]
        cheapest_s = min(seconds[width] / width for width in widths)
        limit_s = cheapest_s * (1 + MIN_SAVING)
        return next(width for width in widths if seconds[width] / width <= limit_s)

    def prompt_tokens(self, width: int, batch_tokens: int) -> int:
        """Return how many prompt tokens go into a step of `width` threads. Call it once a step.

        batch_tokens: limit on the tokens of a step, threads included.
        """
        if width == 0:
            return batch_tokens
        prompt_token_s = median(self._prompt_token_s) if self._prompt_token_s else 0.0
        self._top_up(width, prompt_token_s)
        # Only a step without prompt tokens measures the time of threads alone.
        must_measure = self.costs.width_to_measure([width]) is not None
        if must_measure or self._budget_s < MIN_PROMPT_TOKENS * prompt_token_s:
            is_due = self._steps_without_prompt >= MAX_STEPS_WITHOUT_PROMPT
            return MIN_PROMPT_TOKENS if is_due else 0
        free_tokens = max(
            batch_tokens - width, batch_tokens // MIN_PROMPT_DIVISOR, MIN_PROMPT_TOKENS
        )
        # At most twice as many as before, since their cost is an estimate.
        tokens = min(free_tokens, 2 * max(self._prompt_counts))
        if tokens * prompt_token_s <= self._budget_s:
            return tokens
        return int(self._budget_s / prompt_token_s)

    def _top_up(self, width: int, prompt_token_s: float) -> None:
        """Add to the budget the share of a step of `width`. It holds little more than one share."""
        threads_s = self.costs.seconds(width)
        if threads_s is None:
            return
        share_s = MAX_PROMPT_SHARE / (1 - MAX_PROMPT_SHARE) * threads_s
        max_budget_s = share_s + MIN_PROMPT_TOKENS * prompt_token_s
        self._budget_s = min(self._budget_s + share_s, max_budget_s)
        self._budget_s = max(self._budget_s, -MAX_DEBT_STEPS * share_s)

    def learn(self, width: int, seconds: float, prompt_tokens: int = 0) -> None:
        """Record a step of `width` threads and `prompt_tokens`, which took `seconds`."""
        if prompt_tokens == 0:
            self._steps_without_prompt += 1
            self.costs.add(width, seconds)
            return
        self._steps_without_prompt = 0
        threads_s = self.costs.seconds(width) if width else 0.0
        if threads_s is None:
            return
        prompt_s = max(0.0, seconds - threads_s)
        self._prompt_token_s.append(prompt_s / prompt_tokens)
        if width:
            self._budget_s -= prompt_s
            self._prompt_counts.append(max(MIN_PROMPT_TOKENS, prompt_tokens))


def share_width(
    extra_threads: int,
    min_threads: Sequence[int],
    max_threads: Sequence[int],
    priorities: Sequence[Priority],
) -> list[int]:
    """Return how many threads each answer runs: its `min_threads`, and some of `extra_threads`.

    In each round every answer that has another thread gets one, those of high priority first and
    then the oldest ones, until no extra thread is left.
    """
    counts = list(min_threads)
    order = sorted(range(len(counts)), key=lambda index: (-priorities[index], index))
    while extra_threads > 0:
        waiting = [index for index in order if counts[index] < max_threads[index]]
        if not waiting:
            break
        for index in waiting[:extra_threads]:
            counts[index] += 1
        extra_threads -= len(waiting[:extra_threads])
    return counts


def share_out(unfed_tokens: Sequence[int], tokens: int) -> list[int]:
    """Return how many of `tokens` each prompt gets, of the `unfed_tokens` that it needs.

    The prompts are sorted by age, the oldest first. The shortest are served first, so that none
    waits for a long one; but half of the tokens are reserved for the oldest prompt.
    """
    shares = [0] * len(unfed_tokens)
    shortest_first = sorted(range(len(unfed_tokens)), key=lambda index: unfed_tokens[index])
    free_tokens = tokens
    if shortest_first and shortest_first[0] != 0:
        half = (tokens + 1) // 2
        shares[0] = min(unfed_tokens[0], half)
        free_tokens -= shares[0]
    for index in shortest_first:
        added_tokens = min(unfed_tokens[index] - shares[index], free_tokens)
        shares[index] += added_tokens
        free_tokens -= added_tokens
    return shares
