"""What each thread has written, and what that costs tokens that would come again.

A thread's history is what it sees: the prompt, main's text up to the thread's promise, its own.
Main sees chunks from their sync on. So it is the same however threads are scheduled. Tags, topics
and ends are no text: they neither count nor are penalised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.models.checkpoint import ControlTokens
from pasta_decoding.runtime.request import SamplingParams
from pasta_decoding.runtime.vocabulary import Ids

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What is done to the logits of a few tokens before anything is chosen.

    A logit above 0 is divided by its token's factor, one below multiplied; then `added` is added.
    """

    ids: Ids
    factors: npt.NDArray[np.float32]
    added: npt.NDArray[np.float32]

    def apply(self, logits_V: Logits) -> Logits:
        adjusted_V = logits_V.copy()
        found = adjusted_V[self.ids]
        scaled = np.where(found > 0, found / self.factors, found * self.factors)
        adjusted_V[self.ids] = scaled + self.added
        return adjusted_V


@dataclass
class History:
    """Told of every token of an answer that was chosen, it knows what each thread sees of them.

    exempt: tokens that never count.
    """

    prompt: Sequence[int]
    control: ControlTokens
    exempt: frozenset[int]

    def __post_init__(self) -> None:
        self._said = frozenset(self.prompt) - self.exempt
        self.begin()

    def begin(self) -> None:
        self._seen: dict[int, Counter[int]] = {MAIN: Counter()}
        self._own: dict[int, Counter[int]] = {}
        self._promises = self._joined = 0
        self._in_topic = self._waiting = False

    def note(self, thread: int, token: int) -> None:
        if thread == MAIN:
            self._note_main(token)
        elif token not in self.exempt:
            self._seen[thread][token] += 1
            self._own[thread][token] += 1

    def counts(self, thread: int) -> Counter[int]:
        """Return how often each token stands in what `thread` sees behind the prompt."""
        if thread == MAIN and self._waiting:  # main is asked again: its chunks are complete
            self._waiting = False
            for chunk in range(self._joined + 1, self._promises + 1):
                self._seen[MAIN] += self._own[chunk]
            self._joined = self._promises
        return self._seen[thread]

    def adjustment(
        self, thread: int, params: SamplingParams, bias: Mapping[int, float]
    ) -> Adjustment:
        """Return what penalties and a bias do to the logits of `thread`'s next token."""
        counts = self.counts(thread)
        if thread == MAIN and self._in_topic:
            return biased(bias)
        repeated = counts.keys() | self._said if params.repetition_penalty != 1 else ()
        factors = dict.fromkeys(repeated, params.repetition_penalty)
        added = dict(bias)
        for token, times in counts.items():
            cost = params.presence_penalty + params.frequency_penalty * times
            added[token] = added.get(token, 0.0) - cost
        ids = sorted(factors.keys() | added.keys())
        return Adjustment(
            np.array(ids, dtype=np.int64),
            np.array([factors.get(token, 1.0) for token in ids], dtype=np.float32),
            np.array([added.get(token, 0.0) for token in ids], dtype=np.float32),
        )

    def _note_main(self, token: int) -> None:
        if token == self.control.promise_open:
            self._in_topic = True
        elif self._in_topic and token in self.control.promise_close.values():
            self._in_topic = False
            self._promises += 1
            self._seen[self._promises] = Counter(self._seen[MAIN])
            self._own[self._promises] = Counter()
        elif token == self.control.sync:
            self._waiting = True
        elif not self._in_topic and token not in self.exempt:
            self._seen[MAIN][token] += 1


def biased(bias: Mapping[int, float]) -> Adjustment:
    added = np.array(list(bias.values()), dtype=np.float32)
    return Adjustment(np.array(list(bias), dtype=np.int64), np.ones_like(added), added)
