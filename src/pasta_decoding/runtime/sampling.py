"""Choosing the next token: greedy, sampled, or as a given answer has it.

Noise is a pure function of (seed, request, thread, token index), so a result depends neither on
scheduling nor on who else is being decoded. Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, ChunkRun, PromiseRun, Run, Segment
from pasta_decoding.runtime import drawing
from pasta_decoding.runtime.drawing import Cut, uniforms, weights
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
class Draw:
    """What settles a thread's next token before anybody looks at the logits.

    key: what the noise follows from.
    """

    temperature: float
    cut: Cut
    key: tuple[int, ...]

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
        """See `Chooser`. Overruled is the choice among all tokens."""
        wanted = drawn(logits_V, self.draw(thread, index))
        return self.settle(thread, index, wanted, lambda: logits_V, allowed)

    def draw(self, thread: int, index: int) -> Draw:
        """Return what draws a token among all."""
        sampling = self.sampling
        cut = Cut(sampling.top_p, sampling.top_k)
        return Draw(sampling.temperature, cut, (sampling.seed, self.request, thread, index))

    def settle(
        self,
        thread: int,
        index: int,
        wanted: int,
        logits: Callable[[], Logits],
        allowed: Constraint,
    ) -> Choice:
        """Choose where `wanted` was drawn among all tokens: another if it may not stand there.

        That is drawn anew from the ones that may, which leaves their ratios as they are. `logits`
        fetches the row, where it is needed.
        """
        if allowed.admits(wanted):
            return Choice(wanted, intervened=False)
        return Choice(
            drawn_within(logits, self.draw(thread, index), allowed),
            intervened=not allowed.forced,
        )


def drawn(logits_V: Logits, draw: Draw) -> int:
    """Return the token that is drawn among all."""
    if draw.greedy:
        return int(logits_V.argmax())
    weight_V = weights(logits_V, draw.temperature, draw.cut)
    token = drawing.draw(weight_V, weight_V, draw.cut.top_p, uniforms(*draw.key))
    return int(logits_V.argmax()) if token is None else token


def drawn_within(logits: Callable[[], Logits], draw: Draw, allowed: Constraint) -> int:
    """Return the token that is drawn among the allowed ones: the likeliest if all were cut."""
    only = allowed.instead if allowed.only is None else allowed.only
    if only is not None and len(only) == 1:
        return int(only[0])
    logits_V = logits()
    if draw.greedy:
        return best_allowed(logits_V, allowed)
    weight_V = weights(logits_V, draw.temperature, draw.cut)
    pool_V = weight_V.copy() if only is None else np.zeros_like(weight_V)
    if only is None:
        pool_V[allowed.banned] = 0
    else:
        pool_V[only] = weight_V[only]
    again = uniforms(*draw.key, 1)
    token = drawing.draw(weight_V, pool_V, draw.cut.top_p, again)
    return best_allowed(logits_V, allowed) if token is None else token


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
