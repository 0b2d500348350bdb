"""A chooser that keeps the logits from which each token was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.runtime.allowed import Constraint
from pasta_decoding.runtime.sampling import Choice, Chooser, Logits


@dataclass
class Watched:
    """Chooses as `chooser` does. `logits`: by thread, and by place among the thread's tokens."""

    chooser: Chooser
    logits: dict[tuple[int, int], Logits] = field(default_factory=dict)

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        self.logits[thread, index] = logits_V.copy()
        return self.chooser.choose(thread, index, logits_V, allowed)
