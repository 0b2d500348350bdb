"""Fitting the local judge: what length explains out, ridge chosen and slopes fitted across prompts.

Every split is by prompt: answers to a prompt that was trained on tell nothing new.
Shapes: P pairs, A distinct answers, F features, K terms of length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_decoding.errors import PastaError
from pasta_decoding.eval.judge.base import FOLDS, Pair, fingerprint, fold, logit, sigmoid
from pasta_decoding.eval.judge.local import Array, LocalJudge, length_terms, measured

Mask = NDArray[np.bool_]

# So many pairs of one prompt and source count in full: they are no independent witnesses.
_PAIRS_PER_PROMPT = 10
_RIDGES = (30.0, 300.0, 1000.0, 3000.0)
_LENGTH_RIDGE = 1.0
_INNER_FOLDS = 3
# A feature is cut off beyond these shares of the answers: no single outlier decides.
_CLIPPED = (0.005, 0.995)
_MIN_PROMPTS = 20
_MAX_STEPS = 50


@dataclass(frozen=True, slots=True)
class Measured:
    """Pairs with their answers' features; each distinct answer is measured once.

    a_P, b_P:     index of the pair's answers.
    fold_P:       of the pair's prompt.
    inner_P:      another fold of the prompt, for choices made while fitting.
    preference_P: as in the pairs.
    weight_P:     what a pair counts: less where many share prompt and source.
    """

    pairs: Sequence[Pair]
    features_AF: Array
    length_A: Array
    a_P: NDArray[np.int64]
    b_P: NDArray[np.int64]
    fold_P: NDArray[np.int64]
    inner_P: NDArray[np.int64]
    preference_P: Array
    weight_P: Array

    def preferences(self, judge: LocalJudge) -> Array:
        """Return the judge's preference_P."""
        utility_A = judge.utilities(self.features_AF, self.length_A)
        return _sigmoid(utility_A[self.a_P] - utility_A[self.b_P])


Track = Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]]
"""Hands the items on and may show how far it is."""


def measure(pairs: Sequence[Pair], track: Track = iter) -> Measured:
    """Measure the answers of all pairs, about a thousand a second."""
    asked = [(pair.prompt, answer) for pair in pairs for answer in (pair.a, pair.b)]
    places = {answer: place for place, answer in enumerate(dict.fromkeys(asked))}
    features_AF, length_A = measured(track(list(places)))
    return Measured(
        pairs,
        features_AF,
        length_A,
        a_P=np.array([places[pair.prompt, pair.a] for pair in pairs], dtype=np.int64),
        b_P=np.array([places[pair.prompt, pair.b] for pair in pairs], dtype=np.int64),
        fold_P=np.array([fold(pair.prompt) for pair in pairs], dtype=np.int64),
        inner_P=np.array([int(fingerprint(pair.prompt), 16) % _INNER_FOLDS for pair in pairs]),
        preference_P=np.array([pair.preference for pair in pairs]),
        weight_P=_weights(pairs),
    )


def _weights(pairs: Sequence[Pair]) -> Array:
    sharing = Counter((pair.source, pair.prompt) for pair in pairs)
    shared = [sharing[pair.source, pair.prompt] for pair in pairs]
    return np.minimum(1.0, _PAIRS_PER_PROMPT / np.array(shared, dtype=np.float64))


def cross_fitted(found: Measured, chosen_P: Mask) -> tuple[list[float | None], list[float | None]]:
    """Return the preferences of the whole judge and of the one at equal length, on all pairs.

    A pair is judged by the judge fitted on the chosen pairs of the other folds; None if that one
    has seen its prompt all the same, spelt another way.
    """
    whole: list[float | None] = [None] * len(found.pairs)
    equal = whole.copy()
    for held in range(FOLDS):
        judge = fit(found, chosen_P & (found.fold_P != held))
        whole_P, equal_P = found.preferences(judge), found.preferences(judge.equal_length())
        for place in np.flatnonzero(found.fold_P == held).tolist():
            if not judge.has_seen(found.pairs[place].prompt):
                whole[place], equal[place] = float(whole_P[place]), float(equal_P[place])
    return whole, equal


def fit(found: Measured, chosen_P: Mask) -> LocalJudge:
    """Fit a judge on the chosen pairs. Raises PastaError where they are too few."""
    chosen = [found.pairs[place] for place in np.flatnonzero(chosen_P).tolist()]
    prompts = frozenset(fingerprint(pair.prompt) for pair in chosen)
    if len(prompts) < _MIN_PROMPTS:
        message = f"only {len(prompts)} prompts to train a judge on"
        raise PastaError(message, hint=f"Give pairs on at least {_MIN_PROMPTS} prompts.")
    design = _design(found, chosen_P)
    ridge, slope = _choose(found, design, chosen_P)
    solved = _regress(found, design.difference_PC, chosen_P, design.penalty(ridge))
    terms = design.difference_PC.shape[1] - design.scale_F.size
    weights_F = solved[terms:] / design.scale_F
    explained_K = design.explained_KF @ weights_F
    return LocalJudge(
        weights_F=_plain(weights_F),
        low_F=_plain(design.low_F),
        high_F=_plain(design.high_F),
        length_K=_plain(solved[:terms] - explained_K),
        equal_length_K=_plain(-explained_K),
        slope=slope,
        ridge=ridge,
        trained_on=dict(Counter(pair.source for pair in chosen)),
        prompts=prompts,
    )


@dataclass(frozen=True, slots=True)
class _Design:
    """The columns C of the regression: terms of length, then features freed of length.

    difference_PC: those of answer a less those of answer b.
    explained_KF:  what each term of length adds to each feature, taken out.
    scale_F:       spread of the freed features; they are divided by it.
    """

    difference_PC: Array
    low_F: Array
    high_F: Array
    explained_KF: Array
    scale_F: Array

    def penalty(self, ridge: float) -> Array:
        """Return the ridge of each column."""
        terms = self.difference_PC.shape[1] - self.scale_F.size
        return np.concatenate([np.full(terms, _LENGTH_RIDGE), np.full(self.scale_F.size, ridge)])


def _design(found: Measured, chosen_P: Mask) -> _Design:
    used_A = np.unique(np.concatenate([found.a_P[chosen_P], found.b_P[chosen_P]]))
    seen_AF = found.features_AF[used_A]
    low_F, high_F = np.quantile(seen_AF, _CLIPPED, axis=0)
    rare_F = low_F >= high_F  # a mark that few answers bear is kept as it is
    low_F[rare_F], high_F[rare_F] = seen_AF.min(0)[rare_F], seen_AF.max(0)[rare_F]
    kept_AF = np.clip(found.features_AF, low_F, high_F)
    terms_AK = length_terms(found.length_A)
    known_AK = np.column_stack([np.ones(len(terms_AK)), terms_AK])
    explained_KF = np.linalg.lstsq(known_AK[used_A], kept_AF[used_A], rcond=None)[0]
    freed_AF = kept_AF - known_AK @ explained_KF
    scale_F = freed_AF[used_A].std(axis=0)
    scale_F[scale_F < 1e-9] = 1.0
    columns_AC = np.column_stack([terms_AK, freed_AF / scale_F])
    difference_PC = columns_AC[found.a_P] - columns_AC[found.b_P]
    return _Design(difference_PC, low_F, high_F, explained_KF[1:], scale_F)


def _choose(found: Measured, design: _Design, chosen_P: Mask) -> tuple[float, float]:
    """Return the ridge with the least log loss on prompts not fitted on, and the slope there."""
    best = (np.inf, _RIDGES[0], 1.0)
    for ridge in _RIDGES:
        margin_P = np.zeros(len(found.pairs))
        for held in range(_INNER_FOLDS):
            inside_P, held_P = chosen_P & (found.inner_P != held), found.inner_P == held
            solved = _regress(found, design.difference_PC, inside_P, design.penalty(ridge))
            margin_P[held_P] = design.difference_PC[held_P] @ solved
        chosen = (found.preference_P[chosen_P], found.weight_P[chosen_P])
        slope = _slope(margin_P[chosen_P], *chosen)
        best = min(best, (_log_loss(slope * margin_P[chosen_P], *chosen), ridge, slope))
    return best[1:]


def _regress(found: Measured, columns_PC: Array, chosen_P: Mask, penalty_C: Array) -> Array:
    preference_P, weight_P = found.preference_P[chosen_P], found.weight_P[chosen_P]
    return logistic(columns_PC[chosen_P], preference_P, weight_P, penalty_C)


def _log_loss(margin_P: Array, preference_P: Array, weight_P: Array) -> float:
    loss_P = np.logaddexp(0.0, margin_P) - preference_P * margin_P
    return float(np.average(loss_P, weights=weight_P))


def _slope(margin_P: Array, preference_P: Array, weight_P: Array) -> float:
    """Return what to multiply margins by for calibrated probabilities; 0 if they say nothing."""
    slope_C = logistic(margin_P[:, None], preference_P, weight_P, np.ones(1))
    return max(0.0, float(slope_C[0]))


def logistic(columns_PC: Array, preference_P: Array, weight_P: Array, penalty_C: Array) -> Array:
    """Return the weights of a penalised logistic regression without intercept (Newton's method)."""
    solved_C = np.zeros(columns_PC.shape[1])
    for _ in range(_MAX_STEPS):
        expected_P = _sigmoid(columns_PC @ solved_C)
        slope_C = columns_PC.T @ (weight_P * (expected_P - preference_P)) + penalty_C * solved_C
        bend_P = weight_P * expected_P * (1 - expected_P)
        bend_CC = (columns_PC * bend_P[:, None]).T @ columns_PC + np.diag(penalty_C)
        step_C = np.linalg.solve(bend_CC, slope_C)
        solved_C -= step_C
        if np.abs(step_C).max() < 1e-6:
            break
    return solved_C


def cross_calibrated(
    pairs: Sequence[Pair], verdicts: Sequence[float | None]
) -> tuple[list[float | None], float]:
    """Calibrate somebody else's verdicts; each by a slope fitted on the other folds' prompts.

    Returns them and the slope fitted on all. Missing ones stay missing.
    """
    judged = [place for place, verdict in enumerate(verdicts) if verdict is not None]
    margin_P = np.array([logit(verdicts[place] or 0.0) for place in judged])
    preference_P = np.array([pairs[place].preference for place in judged])
    fold_P = np.array([fold(pairs[place].prompt) for place in judged])
    weight_P = _weights([pairs[place] for place in judged])
    calibrated: list[float | None] = [None] * len(pairs)
    for held in range(FOLDS):
        rest_P = fold_P != held
        slope = _slope(margin_P[rest_P], preference_P[rest_P], weight_P[rest_P])
        for at in np.flatnonzero(fold_P == held).tolist():
            calibrated[judged[at]] = sigmoid(slope * float(margin_P[at]))
    return calibrated, _slope(margin_P, preference_P, weight_P)


def _sigmoid(margin_P: Array) -> Array:
    return 0.5 * (1 + np.tanh(margin_P / 2))


def _plain(numbers: Array) -> tuple[float, ...]:
    return tuple(float(number) for number in numbers)
