"""How many prompt tokens a step takes beside threads that write: as many as measured time allows.

Prompt tokens go into the pass of the threads, which then takes longer. What it takes more is paid
from a budget that each step adds to: a share of what the step takes with threads alone. So a stream
beside a long prompt becomes slower by a known factor, however dear a token of it is there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.governor import StepCosts

DEFAULT_STRETCH = 2.5
PIECE_TOKENS = 256
LEAST_TOKENS = 4
"""Fewer are not fed beside threads, while there are more: a pass for them would not pay."""
DEBT_STEPS = 8
"""What one pass took too long is paid back by so many steps at most: it may never come again."""
MOST_STEPS = 16
"""After so many steps without prompt tokens there are some, whatever they were seen to cost."""


@dataclass(slots=True)
class PromptPace:
    """Decides before each step, and learns from it.

    most_tokens: of a pass.
    stretch:     how many times as long steps may take for the prompt tokens in them, on average.
    """

    most_tokens: int = PIECE_TOKENS
    stretch: float = DEFAULT_STRETCH
    _costs: StepCosts = field(default_factory=StepCosts)
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _budget_s: float = 0.0
    _tokens: deque[int] = field(default_factory=lambda: deque((LEAST_TOKENS,), maxlen=5))
    _steps_without: int = 0

    def __post_init__(self) -> None:
        assert self.most_tokens > 0, "a prompt is fed by at least a token a step"
        if not self.stretch > 1:
            raise PastaError(
                f"the stretch is {self.stretch:g}",
                hint="It is more than 1: how many times as long a step may take for prompts.",
            )

    def tokens(self, width: int) -> int:
        """Return how many prompt tokens go into a step of `width` threads. Call it once a step."""
        if not width:
            return self.most_tokens
        if self._costs.unsure([width]) is not None:
            return 0  # this very step tells what threads take alone
        share_s = (self.stretch - 1) * (self._costs.seconds(width) or 0.0)
        token_s = median(self._token_s) if self._token_s else 0.0
        most_s = share_s + LEAST_TOKENS * token_s
        self._budget_s = max(-DEBT_STEPS * share_s, min(self._budget_s + share_s, most_s))
        if self._budget_s < LEAST_TOKENS * token_s:
            return LEAST_TOKENS if self._steps_without >= MOST_STEPS else 0
        wanted = min(max(LEAST_TOKENS, self.most_tokens - width), 2 * max(self._tokens))
        return wanted if wanted * token_s <= self._budget_s else int(self._budget_s / token_s)

    def learn(self, width: int, prompt_tokens: int, seconds: float) -> None:
        """Hear what a step of so many threads and prompt tokens took."""
        self._steps_without = 0 if prompt_tokens else self._steps_without + 1
        if not prompt_tokens:
            self._costs.add(width, seconds)
            return
        more_s = max(0.0, seconds - (self._costs.seconds(width) or 0.0)) if width else seconds
        self._token_s.append(more_s / prompt_tokens)
        if width:
            self._budget_s -= more_s
            self._tokens.append(max(LEAST_TOKENS, prompt_tokens))
