"""The loss of stage 2: BoNBoN (arXiv 2406.00832), as its paper states it.

    alpha * (-log p(best)) + (1 - alpha) * ((log p/q (best) - log p/q (worst)) - 1 / (2 beta))^2
    beta = 1 / (2 (N - 1) H(N - 1)),  H(n) = 1 + 1/2 + ... + 1/n

p is the model that is trained, q the one that the N candidates were sampled from, and a
sequence's log-probability is the sum over its labels: all threads, forced tokens left out. The
code that was published beside that paper does not compute this square: it calls the sigmoid loss
of DPO instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of one pair and what it is made of, scalars in nats (`square` in nats squared).

    total:  what is minimised.
    sft:    -log p(best), the whole sequence.
    square: the squared distance of `gap` from its target.
    gap:    log-ratio of the best minus log-ratio of the worst.
    drift:  mean of both log-ratios: how far p went from q where q sampled.
    """

    total: Tensor
    sft: Tensor
    square: Tensor
    gap: Tensor
    drift: Tensor


def beta(candidates: int) -> float:
    """Return the beta for which the target gap is that of best-of-N against worst-of-N."""
    assert candidates > 1, "a best and a worst are two"
    others = candidates - 1
    return 1 / (2 * others * sum(1 / n for n in range(1, others + 1)))


def target_gap(candidates: int) -> float:
    """Return 1 / (2 beta) in nats: where the square has its minimum."""
    return 1 / (2 * beta(candidates))


def bonbon_loss(
    best: Tensor,
    worst: Tensor,
    reference_best: Tensor,
    reference_worst: Tensor,
    *,
    target: Tensor | float,
    alpha: float,
) -> PairLoss:
    """Return the loss of one pair from four log-probabilities (scalars, nats)."""
    ratio_best, ratio_worst = best - reference_best, worst - reference_worst
    gap = ratio_best - ratio_worst
    square = (gap - target) ** 2
    total = alpha * -best + (1 - alpha) * square
    return PairLoss(total, -best, square, gap, (ratio_best + ratio_worst) / 2)
