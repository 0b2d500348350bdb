"""Choosing the next token: greedy, sampled, or as a given answer has it.

Noise is a pure function of (seed, request, thread, token index), so a result depends neither on
scheduling nor on who else is being decoded. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pasta_decoding.lang.layout import MAIN, ChunkRun, PromiseRun, Run, Segment
from pasta_decoding.runtime import drawing
from pasta_decoding.runtime.allowed import Constraint
from pasta_decoding.runtime.drawing import Adjustment, Cut, uniforms, weights
from pasta_decoding.runtime.penalties import History, Penalties, biased

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model made of a token: natural logarithms, before anything that sampling does.

    top: the likeliest ids of all, where they were asked for, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and whether the constraint overruled what the model would have written."""

    token: int
    intervened: bool
    logprobs: TokenLogprobs | None = None


class Chooser(Protocol):
    """Picks the next token of a thread."""

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        """Return the `index`-th token (from 0) of `thread`; `allowed` admits it."""
        ...


GREEDY_BELOW = 1e-5
"""A temperature under this is taken as 0: logits divided by it would leave what floats hold."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose. `temperature` 0 is greedy; the other defaults change nothing.

    Whoever makes one from a user's words has checked them: `GenerationConfig`.

    logit_bias: what is added to the logits of some ids. What may not stand stays out all the same.
    logprobs:   how many alternatives to each token are told, beside its own; None: nothing is.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def penalties(self) -> Penalties:
        """What repeated tokens lose."""
        return Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)

    @property
    def greedy(self) -> bool:
        """Is there nothing to draw?"""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Draw:
    """What settles a thread's next token before anybody looks at the logits.

    key:        what the noise follows from.
    adjustment: what comes before anything else, if there is any.
    """

    temperature: float
    cut: Cut
    key: tuple[int, ...]
    adjustment: Adjustment | None = None

    @property
    def greedy(self) -> bool:
        """Is there nothing to draw?"""
        return self.temperature < GREEDY_BELOW

    def adjusted(self, logits_V: Logits) -> Logits:
        """Return the logits among which it chooses."""
        return logits_V if self.adjustment is None else self.adjustment.apply(logits_V)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses by `sampling`; `request` tells answers with the same seed apart.

    history: of the one answer that it chooses for at a time; penalties need it.
    """

    sampling: Sampling
    request: int = 0
    history: History | None = None

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        """See `Chooser`. Overruled is the choice among all tokens."""
        draw = self.draw(thread, index, allowed.bias)
        return self.settle(thread, draw, drawn(logits_V, draw), lambda: logits_V, allowed)

    def draw(self, thread: int, index: int, bias: Mapping[int, float]) -> Draw:
        """Return what draws the `index`-th token of `thread` among all, `bias` added to logits."""
        sampling = self.sampling
        cut = Cut(sampling.top_p, sampling.top_k, sampling.min_p)
        key = (sampling.seed, self.request, thread, index)
        return Draw(sampling.temperature, cut, key, self._adjustment(thread, index, bias))

    def settle(
        self,
        thread: int,
        draw: Draw,
        wanted: int,
        logits: Callable[[], Logits],
        allowed: Constraint,
    ) -> Choice:
        """Choose where `draw` took `wanted` of all tokens: another if it may not stand there.

        That is drawn anew from the ones that may, which leaves their ratios as they are. `logits`
        fetches the row, where it is needed.
        """
        admitted = allowed.admits(wanted)
        token = wanted if admitted else drawn_within(logits, draw, allowed)
        if self.history is not None:
            self.history.note(thread, token)
        top = self.sampling.logprobs
        told = None if top is None else logprobs_of(logits(), token, top)
        return Choice(token, not admitted and not allowed.forced, told)

    def _adjustment(self, thread: int, index: int, bias: Mapping[int, float]) -> Adjustment | None:
        sampling = self.sampling
        added = dict(sampling.logit_bias)
        for token, more in bias.items():
            added[token] = added.get(token, 0.0) + more
        if self.history is None:
            return biased(added) if added else None
        if (thread, index) == (MAIN, 0):
            self.history.begin()
        return self.history.adjustment(thread, sampling.penalties, added)


def logprobs_of(logits_V: Logits, token: int, top: int) -> TokenLogprobs:
    """Return the logarithm of a token's probability, and those of the `top` likeliest."""
    most = float(logits_V.max())
    total = most + math.log(float(np.exp(logits_V - most).sum(dtype=np.float64)))
    top = min(top, len(logits_V))
    ids = np.argpartition(logits_V, -top)[-top:] if top else np.array([], dtype=np.int64)
    ranked = sorted(((one, float(logits_V[one]) - total) for one in ids.tolist()), key=_by_logprob)
    return TokenLogprobs(token, float(logits_V[token]) - total, tuple(ranked))


def _by_logprob(one: tuple[int, float]) -> tuple[float, int]:
    token, logprob = one
    return -logprob, token


def drawn(logits_V: Logits, draw: Draw) -> int:
    """Return the token that is drawn among all."""
    logits_V = draw.adjusted(logits_V)
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
    logits_V = draw.adjusted(logits())
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
