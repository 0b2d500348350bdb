"""Drawing a token from logits without sorting a vocabulary: weights, cuts, and keyed noise.

A draw takes a token by its weight, and takes it back if a cut would have left it out. That leaves
the distribution of what is kept, and costs a few passes over the row, where sorting takes fifty
times as long. Top-k, top-p and min-p all keep the heaviest tokens, so a token that is taken back
takes all lighter ones along: few draws are in vain however narrow the cut.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np
import numpy.typing as npt

from pasta_decoding.runtime.vocabulary import Ids

Weights = npt.NDArray[np.float32]

BLOCK = 256
"""Tokens that are summed up before anybody looks among them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens may be drawn.

    Of those with the `top_k` largest logits and at least `min_p` times the likeliest's probability,
    the fewest that hold `top_p` of what these hold together. Ties at a border stay in.
    """

    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What is done to the logits of a few tokens before anything is chosen.

    A logit above 0 is divided by its token's factor, one below multiplied; then `added` is added.
    """

    ids: Ids
    factors: npt.NDArray[np.float32]
    added: npt.NDArray[np.float32]

    def apply(self, logits_V: Weights) -> Weights:
        """Return the logits with it done."""
        adjusted_V = logits_V.copy()
        found = adjusted_V[self.ids]
        scaled = np.where(found > 0, found / self.factors, found * self.factors)
        adjusted_V[self.ids] = scaled + self.added
        return adjusted_V


def uniforms(*key: int) -> Iterator[float]:
    """Yield numbers in [0, 1), uniform and independent, that follow from `key` alone."""
    name = " ".join(map(str, key))
    for turn in count():
        digest = blake2b(f"{name} {turn}".encode()).digest()
        yield from ((np.frombuffer(digest, "<u8") >> 11) * 2.0**-53).tolist()


def weights(logits_V: Weights, temperature: float, cut: Cut) -> Weights:
    """Return what each token weighs at a temperature, the likeliest 1, behind top-k and min-p."""
    weight_V: Weights = logits_V - logits_V.max()
    weight_V *= np.float32(1 / temperature)
    np.exp(weight_V, out=weight_V)
    least = cut.min_p
    if cut.top_k is not None and cut.top_k < len(weight_V):
        least = max(least, float(np.partition(weight_V, -cut.top_k)[-cut.top_k]))
    if least > 0:
        weight_V *= weight_V >= least
    return weight_V


def draw(weight_V: Weights, pool_V: Weights, top_p: float, noise: Iterator[float]) -> int | None:
    """Draw a token of `pool_V` by weight, from those that hold `top_p` of `weight_V`.

    The pool is all of `weight_V`, or has some tokens' weights set to 0. None if all that it has is
    left out.
    """
    enough = top_p * float(weight_V.sum())
    while (token := pick(pool_V, next(noise))) is not None:
        heavier_V = weight_V > weight_V[token]
        if pool_V[token] > 0 and (top_p == 1 or float((weight_V * heavier_V).sum()) < enough):
            return token
        pool_V = pool_V * heavier_V
    return None


def pick(pool_V: Weights, uniform: float) -> int | None:
    """Return the token in whose share of all weight `uniform` falls; None without any weight.

    At a border, rounding may give a neighbour of no weight.
    """
    sums = np.add.reduceat(pool_V, np.arange(0, len(pool_V), BLOCK))
    ends = np.cumsum(sums, dtype=np.float64)
    if not ends[-1] > 0:  # nor if it is no number
        return None
    mark = uniform * ends[-1]
    block = min(int(np.searchsorted(ends, mark, side="right")), len(ends) - 1)
    inside = np.cumsum(pool_V[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    place = int(np.searchsorted(inside, mark - (ends[block - 1] if block else 0), side="right"))
    return block * BLOCK + min(place, len(inside) - 1)
