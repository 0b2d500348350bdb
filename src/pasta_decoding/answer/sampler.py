"""The next token: greedy, or sampled.

Sampling is a race (the Gumbel-max trick). A token of weight w arrives after the time E/w, where E
is an exponential random number. The first token wins, so a token wins with probability w over the
sum of all weights. E comes from a hash of (seed, request, thread, index) and the token's id. So a
result depends neither on scheduling nor on other answers in the batch, and small changes of the
logits change only near-ties. A cut or a constraint takes tokens out of the race and leaves the
times of the others as they are.

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

# The hash is "lowbias32", with one half of the key added before its rounds and one between them.
ID_FACTOR = 0x9E3779B1
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B
UNIT = 2.0**-32


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. `intervened`: a constraint overruled the model's choice."""

    token: int
    intervened: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to the logits of `ids`, before sampling.

    factors: a logit above 0 is divided by its factor, one below 0 multiplied by it.
    added:   added to the result.
    """

    ids: IdArray
    factors: npt.NDArray[np.float32]
    added: npt.NDArray[np.float32]

    @classmethod
    def of(cls, added: Mapping[int, float], divided: IdArray, factor: float) -> Adjustment:
        """Return an adjustment: numbers to add by id, and one factor for the ids of `divided`."""
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
    """How one token is sampled from its row of logits. The noise is a hash of `key`."""

    params: SamplingParams
    key: tuple[int, ...]
    adjustment: Adjustment | None = None

    @property
    def key_halves(self) -> tuple[int, int]:
        """The key as a hash of 64 bits, in two halves."""
        digest = blake2b(repr(self.key).encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class Sampler:
    """Chooses the tokens of one answer. Equal seeds with different `request` sample differently."""

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
        """Return how the token with this index in `thread` is sampled.

        bias:   added to the logits of these ids, besides the request's own bias.
        text:   ids that the thread sees of the answer; all penalties are for these.
        prompt: ids of the prompt, if there is a repetition penalty, which is for these as well.
        """
        params = self.params
        counts = Counter(text)
        added = dict(params.logit_bias)
        for token, amount in bias.items():
            added[token] = added.get(token, 0.0) + amount
        for token, count in counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            added[token] = added.get(token, 0.0) - penalty
        repeated = NO_IDS
        if params.repetition_penalty != 1:
            repeated = np.union1d(prompt, np.array(list(counts), dtype=np.int64))
        adjustment = None
        if added or len(repeated):
            adjustment = Adjustment.of(added, repeated, params.repetition_penalty)
        # The key is hashed as text, and `repr` of a numpy integer differs from that of an int.
        key = (int(params.seed), self.request, thread, index)
        return RowParams(params, key, adjustment)

    def accept(
        self, row: RowParams, choice: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        """Return the model's `choice` if it is allowed, else the winner among the allowed tokens.

        logits: returns the row's logits; called only if they are needed.
        """
        token = choice
        is_allowed = allowed.admits(choice)
        if not is_allowed:
            alternatives = allowed.alternatives
            if alternatives is not None and len(alternatives) == 1:
                token = int(alternatives[0])
            else:
                token = sample_token(logits(), row, allowed)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = logprobs_of(logits(), token, self.params.logprobs)
        return SampledToken(token, not is_allowed and not allowed.forced, logprobs)


def sample_token(logits_V: Logits, row: RowParams, allowed: Constraint | None = None) -> int:
    """Return the token that wins among all tokens, or among those that `allowed` admits."""
    if row.adjustment is not None:
        logits_V = row.adjustment.apply(logits_V)
    if not row.params.greedy:
        weight_V = weights(logits_V, row.params)
        pool_V = weight_V
        if allowed is not None:
            pool_V = np.where(allowed.candidates(len(weight_V)), weight_V, np.float32(0))
        if (token := winner(weight_V, pool_V, row)) is not None:
            return token
    return int(logits_V.argmax()) if allowed is None else allowed.best(logits_V)


def weights(logits_V: Logits, params: SamplingParams) -> Logits:
    """Return each token's weight, 1 for the likeliest, and 0 where top-k or min-p cut it."""
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
    """Return the first token of `pool_V` to arrive, among those that top-p of `weight_V` keeps.

    The pool is `weight_V`, perhaps with some weights set to 0. Returns None if all of the pool's
    are 0 or NaN. Nothing is sorted: if top-p drops the first token, it also drops all that are not
    heavier, and the race goes on without them.
    """
    noise_V = hashes(len(pool_V), row.key_halves)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        time_V = np.divide(noise_V, pool_V, dtype=np.float32, casting="unsafe")
    top_p_weight = math.inf
    if row.params.top_p < 1:
        top_p_weight = row.params.top_p * float(weight_V.sum())
    while True:
        token = _first(time_V, noise_V, pool_V)
        if np.isnan(time_V[token]):  # 0 / 0: no weight and noise 0, once in 2**32 tokens
            time_V[np.isnan(time_V)] = np.inf
            continue
        if np.isinf(time_V[token]):
            return None
        if top_p_weight == math.inf:
            return token
        heavier_V = weight_V > weight_V[token]
        if float((weight_V * heavier_V).sum()) < top_p_weight:
            return token
        time_V[~heavier_V] = np.inf


def hashes(size: int, key_halves: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Return a number of 32 bits for each token id: a hash of the key and the id alone."""
    first_half, second_half = key_halves
    hash_V = _spread_ids(size) + np.uint32(first_half)
    shifted_V = hash_V >> 16  # reused: a new buffer costs more than the shift
    hash_V ^= shifted_V
    hash_V *= np.uint32(FIRST_FACTOR)
    hash_V ^= np.uint32(second_half)
    hash_V ^= np.right_shift(hash_V, 15, out=shifted_V)
    hash_V *= np.uint32(SECOND_FACTOR)
    hash_V ^= np.right_shift(hash_V, 16, out=shifted_V)
    return hash_V


@cache
def _spread_ids(size: int) -> npt.NDArray[np.uint32]:
    return np.arange(size, dtype=np.uint32) * np.uint32(ID_FACTOR)


def _first(time_V: npt.NDArray[np.float32], noise_V: npt.NDArray[np.uint32], pool_V: Logits) -> int:
    """Return the token that arrives first.

    With u = noise / 2**32 its time is -log(1-u)/w. `time_V` holds u/w, times 2**32, which is faster
    to compute and never larger; so only tokens with a `time_V` below the first one's time matter.
    """
    token = int(time_V.argmin())
    exponential = -math.log1p(-(float(noise_V[token]) + 0.5) * UNIT) / UNIT
    max_time = exponential / float(pool_V[token] or 1)
    candidates = np.flatnonzero(time_V <= max_time)
    if len(candidates) < 2:
        return token
    times = -np.log1p(-(noise_V[candidates] + 0.5) * UNIT) / pool_V[candidates]
    return int(candidates[times.argmin()])


def logprobs_of(logits_V: Logits, token: int, top: int) -> TokenLogprobs:
    """Return the log probabilities of a token and of the `top` likeliest tokens."""
    max_logit = float(logits_V.max())
    shifted_sum = float(np.exp(logits_V - max_logit).sum(dtype=np.float64))
    log_sum = max_logit + math.log(shifted_sum)
    top = min(top, len(logits_V))
    ids = np.argpartition(logits_V, -top)[-top:] if top else np.array([], dtype=np.int64)
    logprobs = [(top_id, float(logits_V[top_id]) - log_sum) for top_id in ids.tolist()]
    ranked = sorted(logprobs, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token, float(logits_V[token]) - log_sum, tuple(ranked))
