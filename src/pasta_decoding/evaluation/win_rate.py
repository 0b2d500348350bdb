"""How often a model's answer is preferred to the baseline's: as it is, and at equal length.

A preference is the probability in [0, 1] that the model's answer is the better one; NaN where no
verdict came. AlpacaEval's files count from 1 (the baseline wins) to 2 (the model wins).

- win rate: 100 x the mean preference of what was judged; a missing verdict is never a tie.
- length-controlled win rate (Dubois et al. 2024, arXiv 2404.04475): a logistic model explains the
  preference by the difference in length, by how difficult the instruction is for AlpacaEval's
  reference, and by the model itself; the win rate is what it predicts on all prompts when both
  answers are equally long. As `length_controlled_noreg` of the package alpaca_eval computes it; or
  as `length_controlled_minimal`, where difficulties are not known.

Shapes: P prompts, F terms of the model, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pasta_decoding.evaluation.bootstrap import Drawn, FloatArray, drawn, resamples

# What the package's LogisticRegressionCV looks at: ten strengths, five folds.
_STRENGTHS = np.logspace(-4, 4, 10)
_FOLDS = 5
_LC_RESAMPLES = 1000  # each is a fit
_MAX_STEPS = 50
_MAX_SWEEPS = 100
_TOLERANCE = 1e-9
# Keeps weights finite where a resample could be explained perfectly.
_RIDGE = 0.01


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a judge said of a model's answers and a baseline's, prompt by prompt.

    preference_P: see above.
    longer_P:     characters of the baseline's answer less those of the model's.
    difficulty_P: of the instructions, in AlpacaEval's unit; None where it is not known.
    """

    preference_P: FloatArray
    longer_P: FloatArray
    difficulty_P: FloatArray | None = None

    @property
    def judged(self) -> int:
        """How many verdicts there are."""
        return int(np.isfinite(self.preference_P).sum())

    @property
    def missing(self) -> int:
        """How many there should be besides."""
        return len(self.preference_P) - self.judged


def win_rate(verdicts: Verdicts, *, seed: int = 0) -> Drawn:
    """Return the win rate in points; NaN if nothing was judged."""
    known_P = np.isfinite(verdicts.preference_P)
    rows_PF = np.stack([np.where(known_P, verdicts.preference_P, 0), known_P], axis=1)
    return drawn(rows_PF, lambda sums: sums[..., 0] / sums[..., 1] * 100, seed=seed)


def length_controlled(verdicts: Verdicts, *, seed: int = 0) -> Drawn:
    """Return the length-controlled win rate in points; NaN if fewer than five were judged.

    The resamples are fitted without the package's penalty: one strong enough to set all weights to
    zero, as it is chosen where there are few verdicts, would make an interval of no width.
    """
    known_P = np.isfinite(verdicts.preference_P)
    if known_P.sum() < _FOLDS:
        return Drawn(np.nan, np.full(_LC_RESAMPLES, np.nan))
    terms_PF = _terms(verdicts)
    level_PF = terms_PF.copy()
    level_PF[:, 0] = 0  # both answers equally long
    kept_PF, preference_P = terms_PF[known_P], verdicts.preference_P[known_P]
    strength = _choose_strength(kept_PF, preference_P)
    weights_F = _fit(kept_PF, preference_P, strength)
    counts_RP = resamples(len(known_P), seed)[:_LC_RESAMPLES]
    weights_RF = _fit_each(kept_PF, preference_P, counts_RP[:, known_P])
    chances_RP = _sigmoid(weights_RF @ level_PF.T)
    return Drawn(
        float(100 * _sigmoid(level_PF @ weights_F).mean()),
        100 * (counts_RP * chances_RP).sum(axis=1) / counts_RP.sum(axis=1),
    )


def _terms(verdicts: Verdicts) -> FloatArray:
    """Return terms_PF: length, difficulty if it is known, and the model itself."""
    spread = np.std(verdicts.longer_P, ddof=1)
    length_P = np.tanh(verdicts.longer_P / spread) if spread else np.zeros_like(verdicts.longer_P)
    difficulty = [] if verdicts.difficulty_P is None else [verdicts.difficulty_P]
    return np.stack([length_P, *difficulty, np.ones_like(length_P)], axis=1)


def _choose_strength(terms_PF: FloatArray, preference_P: FloatArray) -> float:
    """Return the strength with the least loss on rows left out, the smallest of equals."""
    # As scikit-learn's GroupKFold deals out groups of one size: from the last one on.
    fold_P = np.arange(len(preference_P))[::-1] % _FOLDS
    losses = [
        np.mean([_left_out_loss(terms_PF, preference_P, fold_P == k, C) for k in range(_FOLDS)])
        for C in _STRENGTHS
    ]
    return float(_STRENGTHS[int(np.argmin(losses))])


def _left_out_loss(
    terms_PF: FloatArray, preference_P: FloatArray, out_P: npt.NDArray[np.bool_], strength: float
) -> float:
    weights_F = _fit(terms_PF[~out_P], preference_P[~out_P], strength)
    logit_P = terms_PF[out_P] @ weights_F
    return float(np.mean(np.logaddexp(0, logit_P) - preference_P[out_P] * logit_P))


def _fit(terms_PF: FloatArray, preference_P: FloatArray, strength: float) -> FloatArray:
    """Return weights_F that minimise |weights| + strength x the sum of cross entropies.

    Newton's method; each step minimises |weights| + the quadratic part, and is halved until the
    loss falls. The loss is convex, so this is its minimum.
    """

    def loss(weights_F: FloatArray) -> float:
        logit_P = terms_PF @ weights_F
        entropy_P = np.logaddexp(0, logit_P) - preference_P * logit_P
        return float(np.abs(weights_F).sum() + strength * entropy_P.sum())

    weights_F = np.zeros(terms_PF.shape[1])
    now = loss(weights_F)
    for _ in range(_MAX_STEPS):
        chance_P = _sigmoid(terms_PF @ weights_F)
        slope_F = strength * (terms_PF.T @ (chance_P - preference_P))
        bend_P = chance_P * (1 - chance_P)
        bend_FF = strength * (terms_PF.T @ (bend_P[:, None] * terms_PF))
        bend_FF += 1e-10 * np.eye(len(weights_F))
        step_F = _lasso(bend_FF, slope_F, weights_F) - weights_F
        size, then = 1.0, loss(weights_F + step_F)
        while then > now and size > 1e-6:
            size /= 2
            then = loss(weights_F + size * step_F)
        if now - then <= _TOLERANCE * max(1.0, abs(now)):
            break
        weights_F, now = weights_F + size * step_F, then
    return weights_F


def _lasso(bend_FF: FloatArray, slope_F: FloatArray, start_F: FloatArray) -> FloatArray:
    """Return the w that minimises |w| + slope (w - start) + (w - start) bend (w - start) / 2."""
    w_F = start_F.copy()
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for f in range(len(w_F)):
            pull = bend_FF[f, f] * w_F[f] - slope_F[f] - float(bend_FF[f] @ (w_F - start_F))
            new = np.sign(pull) * max(abs(pull) - 1, 0.0) / bend_FF[f, f]
            largest = max(largest, abs(new - w_F[f]))
            w_F[f] = new
        if largest < 1e-10:
            break
    return w_F


def _fit_each(terms_PF: FloatArray, preference_P: FloatArray, counts_RP: FloatArray) -> FloatArray:
    """Return weights_RF: the most likely ones for each resample, by Newton's method."""
    weights_RF = np.zeros((len(counts_RP), terms_PF.shape[1]))
    squares_PFF = terms_PF[:, :, None] * terms_PF[:, None, :]
    for _ in range(_MAX_STEPS):
        chances_RP = _sigmoid(weights_RF @ terms_PF.T)
        slope_RF = (counts_RP * (chances_RP - preference_P)) @ terms_PF + _RIDGE * weights_RF
        bends_RP = counts_RP * chances_RP * (1 - chances_RP)
        bend_RFF = np.tensordot(bends_RP, squares_PFF, axes=1)
        bend_RFF += _RIDGE * np.eye(terms_PF.shape[1])
        # Far from the minimum a whole step may lead away from it.
        step_RF = np.clip(np.linalg.solve(bend_RFF, slope_RF[:, :, None])[:, :, 0], -2, 2)
        weights_RF -= step_RF
        if np.abs(step_RF).max(initial=0) < 1e-8:
            break
    return weights_RF


def _sigmoid(logit_P: FloatArray) -> FloatArray:
    return 0.5 * (1 + np.tanh(0.5 * logit_P))
