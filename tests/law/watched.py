"""A source of tokens that keeps the logits from which each token was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.sampler import Choice, Logits, TokenSource


@dataclass
class Watched:
    """Chooses as `source` does. `logits`: by thread, and by place among the thread's tokens."""

    source: TokenSource
    logits: dict[tuple[int, int], Logits] = field(default_factory=dict)

    def sample(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        self.logits[thread, index] = logits_V.copy()
        return self.source.sample(thread, index, logits_V, allowed)
