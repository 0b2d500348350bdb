"""The next token: greedy, or sampled.

Sampling is a race. A token of weight w arrives after E/w, where E is exponential, and the first one
is taken: so each wins with probability w over the sum of all (the Gumbel-max trick). E is a hash of
(seed, request, thread, index) and the token's id. So a result depends neither on scheduling nor on
who else is decoded, and where logits move a little, only near-ties move. A cut or a constraint
takes tokens out of the race and changes nobody's time.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pasta_decoding.answer.constraints import NO_IDS, Constraint
from pasta_decoding.answer.events import TokenLogprobs
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.answer.vocabulary import IdArray

Logits = npt.NDArray[np.float32]

# A keyed hash of 32 bits ("lowbias32", with the key's halves before and between its rounds).
ID_FACTOR, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
UNIT = 2.0**-32


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and whether the constraint overruled what the model would have written."""

    token: int
    intervened: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Some logits first: one above 0 is divided by its factor, one below multiplied; then added."""

    ids: IdArray
    factors: npt.NDArray[np.float32]
    added: npt.NDArray[np.float32]

    @classmethod
    def of(cls, added: Mapping[int, float], divided: IdArray, factor: float) -> Adjustment:
        """Add some numbers, and divide (or multiply) the logits of some ids by a factor."""
        added_ids = np.array(list(added), dtype=np.int64)
        ids = np.union1d(added_ids, divided)
        factors = np.ones(len(ids), np.float32)
        factors[np.searchsorted(ids, divided)] = factor
        sums = np.zeros(len(ids), np.float32)
        sums[np.searchsorted(ids, added_ids)] = list(added.values())
        return cls(ids, factors, sums)

    def apply(self, logits_V: Logits) -> Logits:
        adjusted_V = logits_V.copy()
        logits = adjusted_V[self.ids]
        scaled = np.where(logits > 0, logits / self.factors, logits * self.factors)
        adjusted_V[self.ids] = scaled + self.added
        return adjusted_V


@dataclass(frozen=True, slots=True)
class RowParams:
    """How one token is sampled from its logits. `key`: the noise is a hash of it."""

    params: SamplingParams
    key: tuple[int, ...]
    adjustment: Adjustment | None = None

    @property
    def key_halves(self) -> tuple[int, int]:
        digest = blake2b(repr(self.key).encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class Sampler:
    """Where an answer's tokens come from: by `params`; `request` tells equal seeds apart."""

    params: SamplingParams
    request: int = 0

    def row(
        self,
        thread: int,
        index: int,
        bias: Mapping[int, float],
        text: Iterable[int] = (),
        prompt: IdArray = NO_IDS,
    ) -> RowParams:
        """Return how the `index`-th token is sampled; penalties are for `text` and `prompt`."""
        params, counts = self.params, Counter(text)
        added = dict(params.logit_bias)
        for token, more in bias.items():
            added[token] = added.get(token, 0.0) + more
        for token, times in counts.items():
            cost = params.presence_penalty + params.frequency_penalty * times
            added[token] = added.get(token, 0.0) - cost
        factor, repeated = params.repetition_penalty, NO_IDS
        if factor != 1:
            repeated = np.union1d(prompt, np.array(list(counts), dtype=np.int64))
        changed = added or len(repeated)
        adjustment = Adjustment.of(added, repeated, factor) if changed else None
        # The noise is a hash of the key as text, and a number of numpy's has another one.
        return RowParams(params, (int(params.seed), self.request, thread, index), adjustment)

    def accept(
        self, row: RowParams, wanted: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        """Take the winner among all tokens, or else among the allowed ones.

        `logits` fetches the row where that is needed.
        """
        token, admitted, only = wanted, allowed.admits(wanted), allowed.alternatives
        if not admitted and only is not None and len(only) == 1:
            token = int(only[0])
        elif not admitted:
            token = sample_token(logits(), row, allowed)
        top = self.params.logprobs
        reported = None if top is None else logprobs_of(logits(), token, top)
        return SampledToken(token, not admitted and not allowed.forced, reported)


def sample_token(logits_V: Logits, row: RowParams, allowed: Constraint | None = None) -> int:
    """Return the token that wins among all, or among the allowed ones."""
    if row.adjustment is not None:
        logits_V = row.adjustment.apply(logits_V)
    if not row.params.greedy:
        weight_V = pool_V = weights(logits_V, row.params)
        if allowed is not None:
            pool_V = np.where(allowed.candidates(len(weight_V)), weight_V, np.float32(0))
        if (token := winner(weight_V, pool_V, row)) is not None:
            return token
    return int(logits_V.argmax()) if allowed is None else allowed.best(logits_V)


def weights(logits_V: Logits, params: SamplingParams) -> Logits:
    """Return what each token weighs at a temperature, the likeliest 1, behind top-k and min-p."""
    weight_V: Logits = logits_V - logits_V.max()
    weight_V *= np.float32(1 / params.temperature)
    np.exp(weight_V, out=weight_V)
    min_weight = params.min_p
    top_k = params.top_k
    if top_k is not None and top_k < len(weight_V):
        top_k_weight = float(np.partition(weight_V, -top_k)[-top_k])
        min_weight = max(min_weight, top_k_weight)
    if min_weight > 0:
        weight_V *= weight_V >= min_weight
    return weight_V


def winner(weight_V: Logits, pool_V: Logits, row: RowParams) -> int | None:
    """Return the first token of `pool_V` among those that hold `top_p` of `weight_V`.

    The pool is all of `weight_V`, or has some weights set to 0. None if nobody runs, or a weight is
    no number. If top-p leaves the first one out, then also all not heavier: nothing is sorted.
    """
    noise_V = hashes(len(pool_V), row.key_halves)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        time_V = np.divide(noise_V, pool_V, dtype=np.float32, casting="unsafe")
    enough = row.params.top_p * float(weight_V.sum()) if row.params.top_p < 1 else math.inf
    while True:
        token = _first(time_V, noise_V, pool_V)
        if np.isnan(time_V[token]):  # no weight and no noise, once in 2**32 tokens
            time_V[np.isnan(time_V)] = np.inf
            continue
        if np.isinf(time_V[token]):
            return None
        heavier_V = weight_V > weight_V[token] if enough < math.inf else None
        if heavier_V is None or float((weight_V * heavier_V).sum()) < enough:
            return token
        time_V[~heavier_V] = np.inf


def hashes(size: int, key_halves: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Return a number of 32 bits for each token id: a hash of the key and the id alone."""
    before, between = key_halves
    hash_V = _spread_ids(size) + np.uint32(before)
    shifted_V = hash_V >> 16  # one buffer for all shifts: a new one a shift costs more than it
    hash_V ^= shifted_V
    hash_V *= np.uint32(FIRST_FACTOR)
    hash_V ^= np.uint32(between)
    hash_V ^= np.right_shift(hash_V, 15, out=shifted_V)
    hash_V *= np.uint32(SECOND_FACTOR)
    hash_V ^= np.right_shift(hash_V, 16, out=shifted_V)
    return hash_V


@cache
def _spread_ids(size: int) -> npt.NDArray[np.uint32]:
    return np.arange(size, dtype=np.uint32) * np.uint32(ID_FACTOR)


def _first(time_V: npt.NDArray[np.float32], noise_V: npt.NDArray[np.uint32], pool_V: Logits) -> int:
    """Return the first token. `time_V` is noise/w, which the true time, -log(1-u)/w, exceeds."""
    token = int(time_V.argmin())
    true_time = -math.log1p(-(float(noise_V[token]) + 0.5) * UNIT) / UNIT
    max_time = true_time / float(pool_V[token] or 1)
    near = np.flatnonzero(time_V <= max_time)
    if len(near) < 2:
        return token
    times = -np.log1p(-(noise_V[near] + 0.5) * UNIT) / pool_V[near]
    return int(near[times.argmin()])


def logprobs_of(logits_V: Logits, token: int, top: int) -> TokenLogprobs:
    """Return the logarithm of a token's probability, and those of the `top` likeliest."""
    max_logit = float(logits_V.max())
    log_sum = math.log(float(np.exp(logits_V - max_logit).sum(dtype=np.float64)))
    total = max_logit + log_sum
    top = min(top, len(logits_V))
    ids = np.argpartition(logits_V, -top)[-top:] if top else np.array([], dtype=np.int64)
    logprobs = [(other, float(logits_V[other]) - total) for other in ids.tolist()]
    ranked = sorted(logprobs, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token, float(logits_V[token]) - total, tuple(ranked))
