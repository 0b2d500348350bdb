"""Choosing chunks that do not overlap: all ways to cut a response, weighed against each other.

Every way to take some candidates, none overlapping, has the product of their odds as its weight
(a unit in the main thread weighs 1). A candidate's probability is the share of the weight that
takes it: forward and backward sums over the units, as in a semi-Markov chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pasta_decoding.data.annotate.candidates import Candidate


def semi_markov_marginals(
    units: int, candidates: Sequence[Candidate], log_odds: Sequence[float]
) -> tuple[float, list[float]]:
    """Return the log of the weight of all ways, and how likely each candidate is to be taken."""
    backward = _sums(
        units,
        [(units - 1 - one.last, units - one.first) for one in candidates],
        log_odds,
    )
    forward = _sums(units, [(one.first, one.last + 1) for one in candidates], log_odds)
    probabilities = [
        math.exp(forward[one.first] + odds + backward[units - 1 - one.last] - forward[units])
        for one, odds in zip(candidates, log_odds, strict=True)
    ]
    return forward[units], probabilities


def choose(units: int, candidates: Sequence[Candidate], gains: Sequence[float]) -> list[Candidate]:
    """Return the candidates of the largest sum of gains that do not overlap, in order."""
    ending = _by_end(units, [one.last + 1 for one in candidates])
    best: list[tuple[float, Candidate | None]] = [(0.0, None)]
    for end in range(1, units + 1):
        options = [
            (best[candidates[n].first][0] + gains[n], candidates[n])
            for n in ending[end]
            if gains[n] > 0
        ]
        best.append(max([(best[-1][0], None), *options], key=lambda option: option[0]))
    taken: list[Candidate] = []
    end = units
    while end > 0:
        last = best[end][1]
        taken += [last] if last else []
        end = last.first if last else end - 1
    return taken[::-1]


def _sums(units: int, edges: Sequence[tuple[int, int]], log_odds: Sequence[float]) -> list[float]:
    """Return, for each place between units, the log of the weight of all ways to get there."""
    ending = _by_end(units, [end for _, end in edges])
    sums = [0.0]
    for end in range(1, units + 1):
        ways = [sums[edges[n][0]] + log_odds[n] for n in ending[end]]
        sums.append(_log_sum([sums[-1], *ways]))
    return sums


def _by_end(units: int, ends: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(units + 1)]
    for index, end in enumerate(ends):
        found[end].append(index)
    return found


def _log_sum(logs: Sequence[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs))
