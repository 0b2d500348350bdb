"""The losses of stage 2, from log-probabilities of whole answers (sums over labels, nats).

p is the trained model, q the model that the answers were sampled from, r = ln p - ln q.

`anchored` gives the best and the worst answer a target each. The best-of-N policy is
N Q^(N-1) q, where Q is the quantile of an answer's score, so the expected log-ratios are

    t_best = ln N - (N - 1) / N        t_worst = ln N - (N - 1) H(N),   H(n) = 1 + 1/2 + ... + 1/n

    (r_best - t_best)^2 + 0.25 (r_worst - max(t_worst, -4))^2 + 0.5 NLL(best) + 0.5 NLL(replay)

So the best answer is pulled back if it falls, which a difference alone does not do (in DPO that is
known as likelihood displacement, arXiv 2410.08847). r_worst counts only the labels in which the
worst differs: `pairs.differing_labels`.

`square` and `sigmoid` are BoNBoN (arXiv 2406.00832), as its paper and as its published code have
it. Both hold the difference of the log-ratios alone, with the target 1 / (2 beta):

    square    alpha NLL(best) + (1 - alpha) (r_best - r_worst - 1 / (2 beta))^2
    sigmoid   alpha NLL(best) - (1 - alpha) ln sigmoid(beta (r_best - r_worst))
    beta = 1 / (2 (N - 1) H(N - 1))

`rejection` is finetuning on the best answer alone.
"""

from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pasta_decoding.training.view import LossParts

LOWEST_WORST_TARGET = -4.0
"""Nats. Pushing the worst answer further down moves everything that it shares with others."""
WORST_WEIGHT = 0.25
SFT_WEIGHT = 0.5
REPLAY_WEIGHT = 0.5


def harmonic_number(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def best_target(candidates: int) -> float:
    """Return the expected log-ratio of the best of N answers, in nats."""
    return log(candidates) - (candidates - 1) / candidates


def worst_target(candidates: int) -> float:
    """Return the expected log-ratio of the worst of N answers, in nats; not yet limited."""
    return log(candidates) - (candidates - 1) * harmonic_number(candidates)


def gap_target(candidates: int) -> float:
    """Return 1 / (2 beta) in nats: the gap that best and worst of N answers should have."""
    assert candidates > 1, "best and worst are two answers"
    return (candidates - 1) * harmonic_number(candidates - 1)


def anchored_loss(
    best: Tensor,
    worst: Tensor,
    replay: Tensor,
    *,
    reference_best: float,
    reference_worst: float,
    best_of: int,
    worst_of: int,
) -> tuple[Tensor, LossParts]:
    """Return the loss of one pair and its parts.

    best, replay:  ln p of the whole answer. A pair without a replayed row has 0.
    worst:         ln p of the labels in which the worst differs.
    reference_...: the same under q.
    best_of, worst_of: the numbers of answers that best and worst were chosen from.
    """
    ratio_best = best - reference_best
    ratio_worst = worst - reference_worst
    worst_goal = max(worst_target(worst_of), LOWEST_WORST_TARGET)
    total = (
        (ratio_best - best_target(best_of)) ** 2
        + WORST_WEIGHT * (ratio_worst - worst_goal) ** 2
        - SFT_WEIGHT * best
        - REPLAY_WEIGHT * replay
    )
    return total, {
        "sft": -best,
        "replay": -replay,
        "ratio_best": ratio_best,
        "ratio_worst": ratio_worst,
    }


def anchored_pulls(best_of: int, worst_of: int) -> dict[str, float]:
    """Return the share of each term in the pull on its log-probability before the first step.

    The pull is the derivative of the term, per nat, where both log-ratios are 0.
    """
    worst_goal = max(worst_target(worst_of), LOWEST_WORST_TARGET)
    pulls = {
        "best": 2 * best_target(best_of),
        "worst": 2 * WORST_WEIGHT * abs(worst_goal),
        "sft": SFT_WEIGHT,
        "replay": REPLAY_WEIGHT,
    }
    total = sum(pulls.values())
    return {term: pull / total for term, pull in pulls.items()}


def bonbon_loss(
    best: Tensor,
    worst: Tensor,
    *,
    reference_best: float,
    reference_worst: float,
    candidates: int,
    alpha: float,
    sigmoid: bool,
) -> tuple[Tensor, LossParts]:
    """Return the loss of one pair and its parts; every log-probability is of the whole answer."""
    ratio_best = best - reference_best
    ratio_worst = worst - reference_worst
    gap = ratio_best - ratio_worst
    target = gap_target(candidates)
    contrast = -logsigmoid(gap / (2 * target)) if sigmoid else (gap - target) ** 2
    total = alpha * -best + (1 - alpha) * contrast
    return total, {
        "sft": -best,
        "contrast": contrast,
        "gap": gap,
        "target": torch.tensor(target),
        "ratio_best": ratio_best,
        "ratio_worst": ratio_worst,
    }
