"""What a judge is, and what it is asked.

- preference: probability in [0, 1] that answer a is better than answer b; 0.5 is a tie.
- quality: of one answer within a group of answers to the same prompt, the mean probability that it
  beats each of the others, in [0, 1].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

# One prompt in so many is held out from training, by its hash.
FOLDS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, and how somebody judged them.

    source:     whose judgement it is; figures are kept apart by it.
    preference: that of the somebody, see above.
    """

    source: str
    prompt: str
    a: str
    b: str
    preference: float


class Judge(Protocol):
    """Compares pairs of answers. The order of the two must not matter.

    So `prefer(p, b, a)` is one minus `prefer(p, a, b)`: by construction, or because the judge is
    really asked in both orders.
    """

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the preference for a over b, one for each prompt; None where there is no verdict.

        A missing verdict is no tie: whoever asks must count it. Raises PastaError if the judge
        cannot be asked at all.
        """
        ...


def quality(judge: Judge, prompt: str, answers: Sequence[str]) -> list[float | None]:
    """Return the quality of each answer within the group, in order.

    None for an answer without any verdict; that of a lone answer is 0.5.
    """
    if len(answers) == 1:
        return [0.5]
    games = list(combinations(range(len(answers)), 2))
    verdicts = judge.prefer(
        [prompt] * len(games), [answers[i] for i, _ in games], [answers[k] for _, k in games]
    )
    won: list[list[float]] = [[] for _ in answers]
    for (i, k), verdict in zip(games, verdicts, strict=True):
        if verdict is not None:
            won[i].append(verdict)
            won[k].append(1 - verdict)
    return [sum(games_won) / len(games_won) if games_won else None for games_won in won]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A judge whose verdicts' logits are multiplied by `slope`; both orders stay consistent."""

    judge: Judge
    slope: float

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the judge's preferences, calibrated."""
        verdicts = self.judge.prefer(prompts, a, b)
        return [None if p is None else sigmoid(self.slope * logit(p)) for p in verdicts]


def sigmoid(logit: float) -> float:
    """Return the probability of a logit."""
    return 0.5 * (1 + math.tanh(logit / 2))


def logit(probability: float, *, margin: float = 0.01) -> float:
    """Return the logit of a probability, which is kept `margin` away from 0 and 1."""
    kept = min(max(probability, margin), 1 - margin)
    return math.log(kept / (1 - kept))


def fingerprint(prompt: str) -> str:
    """Return twelve hexadecimal digits that stand for a prompt; case and spacing do not count."""
    plain = " ".join(prompt.casefold().split())
    return hashlib.sha256(plain.encode("utf-8", "replace")).hexdigest()[:12]


def fold(prompt: str) -> int:
    """Return the fold of a prompt; fold 0 is held out: nothing is trained or tuned on it."""
    return int(hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest(), 16) % FOLDS
