"""Choosing the next token: greedy, sampled, or as a given answer has it.

Noise is a pure function of (seed, request, thread, token index), so a result depends neither on
scheduling nor on who else is being decoded. Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, ChunkRun, PromiseRun, Run, Segment
from pasta_decoding.runtime.rules import Constraint

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and whether the constraint overruled what the model would have written."""

    token: int
    intervened: bool


class Chooser(Protocol):
    """Picks the next token of a thread."""

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        """Return the `index`-th token (from 0) of `thread`; `allowed` admits it."""
        ...


GREEDY_BELOW = 1e-5
"""A temperature under this is taken as 0: logits divided by it would leave what floats hold."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose. `temperature` 0 is greedy; `top_k` None and `top_p` 1 keep every token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise PastaError(f"temperature {self.temperature} is not between 0 and 100")
        if not 0 < self.top_p <= 1:
            raise PastaError(f"top-p {self.top_p} is not above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise PastaError(f"top-k {self.top_k} is not at least 1")
        if self.seed < 0:
            raise PastaError(f"seed {self.seed} is not at least 0")

    @property
    def greedy(self) -> bool:
        """Is there nothing to draw?"""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses by `sampling`; `request` tells answers with the same seed apart."""

    sampling: Sampling
    request: int = 0

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        """See `Chooser`. Overruled is the choice among all tokens, same noise."""
        score_V = logits_V if self.sampling.greedy else self._scores(thread, index, logits_V)
        wanted = int(score_V.argmax())
        token = best_allowed(score_V, allowed)
        return Choice(token, intervened=token != wanted and not allowed.forced)

    def _scores(self, thread: int, index: int, logits_V: Logits) -> npt.NDArray[Any]:
        """Scaled logits plus Gumbel noise: the largest is a sample of the softmax (Gumbel-max)."""
        scaled_V = logits_V.astype(np.float64) / self.sampling.temperature
        key = (self.sampling.seed, self.request, thread, index)
        noise = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        # numpy's own gumbel() draws the same, one number at a time: it takes three times as long.
        gumbel_V = -np.log(-np.log1p(-noise.random(size=len(logits_V))))
        if self.sampling.top_k is None and self.sampling.top_p == 1:
            return scaled_V + gumbel_V
        kept_V = self._nucleus(scaled_V)
        # Cut tokens stay below all others, so that a constraint finds one even among them.
        return np.where(kept_V, scaled_V + gumbel_V, scaled_V - 1e9)

    def _nucleus(self, scaled_V: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Mark the tokens that top-k and top-p keep; ties at the border stay in."""
        kept_V = np.ones(len(scaled_V), dtype=bool)
        if self.sampling.top_k is not None and self.sampling.top_k < len(scaled_V):
            kept_V &= scaled_V >= np.partition(scaled_V, -self.sampling.top_k)[-self.sampling.top_k]
        if self.sampling.top_p < 1:
            order_V = np.argsort(-scaled_V, kind="stable")
            mass_V = np.exp(scaled_V[order_V] - scaled_V[order_V[0]]) * kept_V[order_V]
            before_V = np.cumsum(mass_V) - mass_V
            inside_V = before_V < self.sampling.top_p * mass_V.sum()
            kept_V &= scaled_V >= scaled_V[order_V[inside_V][-1]]
        return kept_V


class Replay:
    """Writes a given answer again, whatever the model thinks: for timing and for the law."""

    def __init__(self, segments: Sequence[Segment], *, async_close: int, end: int) -> None:
        self._threads: dict[int, list[int]] = {MAIN: []}
        for segment in segments:
            match segment:
                case Run(ids) | PromiseRun(ids):
                    self._threads[MAIN].extend(ids)
                case ChunkRun(ids):
                    self._threads[len(self._threads)] = [*ids[1:], async_close]
                case _:
                    self._threads[MAIN].append(segment.id)
        self._threads[MAIN].append(end)

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:  # noqa: ARG002
        """See `Chooser`."""
        return Choice(self._threads[thread][index], intervened=False)


def best_allowed(score_V: npt.NDArray[Any], allowed: Constraint) -> int:
    """Return the allowed id with the largest score; the smallest id of equals."""
    only = allowed.only
    if only is None:
        best = int(score_V.argmax())
        if not np.any(allowed.banned == best):
            return best
        only = allowed.instead
    if only is not None:
        return int(only[score_V[only].argmax()])
    open_V = score_V.copy()
    open_V[allowed.banned] = -np.inf
    return int(open_V.argmax())
