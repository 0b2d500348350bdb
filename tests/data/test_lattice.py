"""Choosing chunks that do not overlap, against all ways tried one by one."""

from __future__ import annotations

import math
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.data.annotate.candidates import Candidate
from pasta_decoding.data.annotate.lattice import choose, semi_markov_marginals

UNITS = 5

Scored = list[tuple[Candidate, float]]

RUNS = st.tuples(st.integers(0, UNITS - 1), st.integers(0, UNITS - 1)).filter(
    lambda run: run[0] <= run[1]
)
SCORED = st.dictionaries(
    RUNS.map(lambda run: Candidate(*run)), st.floats(-4, 4), min_size=1, max_size=8
).map(lambda found: list(found.items()))


def ways(scored: Scored) -> list[Scored]:
    """All ways to take some of them, none overlapping."""
    sets = chain.from_iterable(combinations(scored, n) for n in range(len(scored) + 1))
    return [list(one) for one in sets if not overlapping([candidate for candidate, _ in one])]


def overlapping(taken: list[Candidate]) -> bool:
    units = [unit for one in taken for unit in range(one.first, one.last + 1)]
    return len(units) != len(set(units))


@given(SCORED)
def test_a_candidate_is_as_likely_as_the_weight_of_the_ways_that_take_it(scored: Scored) -> None:
    candidates, odds = zip(*scored, strict=True)
    weights = [(way, math.exp(sum(log_odds for _, log_odds in way))) for way in ways(scored)]
    total = sum(weight for _, weight in weights)
    found, likely = semi_markov_marginals(UNITS, candidates, odds)
    assert found == pytest.approx(math.log(total))
    for candidate, probability in zip(candidates, likely, strict=True):
        taken = [weight for way, weight in weights if candidate in dict(way)]
        assert probability == pytest.approx(sum(taken) / total)


@given(SCORED)
def test_no_other_choice_gains_more(scored: Scored) -> None:
    candidates, gains = zip(*scored, strict=True)
    taken = choose(UNITS, candidates, gains)
    assert not overlapping(taken)
    assert taken == sorted(taken, key=lambda one: one.first)
    best = max(sum(gain for _, gain in way) for way in ways(scored))
    assert sum(dict(scored)[one] for one in taken) == pytest.approx(best)


def test_where_nothing_gains_nothing_is_taken() -> None:
    assert choose(3, [Candidate(0, 1)], [0.0]) == []
    assert choose(0, [], []) == []
    assert semi_markov_marginals(0, [], []) == (0.0, [])
