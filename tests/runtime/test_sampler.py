"""Choosing tokens: noise that depends on nothing but its key, and constraints that always hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Run, Segment, SyncRun
from pasta_decoding.runtime.constraints import NOTHING, Constraint
from pasta_decoding.runtime.request import SamplingParams
from pasta_decoding.runtime.sampler import Choice, Logits, Replay, Sampler
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SYNC

FREE = Constraint(NOTHING)
LOGITS: Logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
DRAWS = 800
Doubles = npt.NDArray[np.float64]


def ban(*ids: int) -> Constraint:
    return Constraint(np.array(ids))


def only(*ids: int) -> Constraint:
    return Constraint(NOTHING, only=np.array(ids))


def shares(
    sampling: SamplingParams, allowed: Constraint = FREE, logits_V: Logits = LOGITS
) -> list[float]:
    """How often each token was drawn."""
    sampler = Sampler(sampling)
    drawn = Counter(sampler.sample(0, n, logits_V, allowed).token for n in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(logits_V))]


def line(sampler: Sampler, thread: int = 0) -> list[int]:
    flat_V = np.zeros(1000, dtype=np.float32)
    return [sampler.sample(thread, n, flat_V, FREE).token for n in range(8)]


# Noise


def test_the_same_key_gives_the_same_token_in_any_order() -> None:
    sampler, again = Sampler(SamplingParams(temperature=1)), Sampler(SamplingParams(temperature=1))
    flat_V = np.zeros(1000, dtype=np.float32)
    backwards = [again.sample(0, n, flat_V, FREE).token for n in reversed(range(8))]
    assert line(sampler) == line(sampler) == backwards[::-1]


def test_each_part_of_the_key_counts() -> None:
    lines = [
        line(Sampler(SamplingParams(temperature=1))),
        line(Sampler(SamplingParams(temperature=1, seed=1))),
        line(Sampler(SamplingParams(temperature=1), request=1)),
        line(Sampler(SamplingParams(temperature=1)), thread=1),
    ]
    assert len({tuple(tokens) for tokens in lines}) == 4
    assert all(len(set(tokens)) > 1 for tokens in lines)


# Frequencies: with 800 draws the standard error of a share is below 0.018.


def test_a_high_temperature_evens_out_and_a_low_one_sharpens() -> None:
    assert shares(SamplingParams(temperature=100)) == pytest.approx([0.25] * 4, abs=0.06)
    assert shares(SamplingParams(temperature=0.1))[0] > 0.99
    assert shares(SamplingParams(temperature=5e-324))[0] == 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.45, 1), (0.7, 2), (0.85, 3), (0.95, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    got = shares(SamplingParams(temperature=1, top_p=top_p))
    assert [share > 0 for share in got] == [token < kept for token in range(4)]


def test_ties_at_the_border_stay_in() -> None:
    level_V = np.zeros(4, dtype=np.float32)
    assert min(shares(SamplingParams(temperature=1, top_k=2), logits_V=level_V)) > 0
    assert min(shares(SamplingParams(temperature=1, top_p=0.3), logits_V=level_V)) > 0


def test_a_constraint_finds_its_token_among_those_that_top_k_cut() -> None:
    sampler = Sampler(SamplingParams(temperature=1, top_k=1))
    assert sampler.sample(0, 0, LOGITS, ban(0)) == Choice(1, intervened=True)


CHI_SQUARED_7 = 24.3
"""Of seven degrees of freedom, which a thousandth of all samples exceed."""


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=6, seed=3),
    ],
)
@pytest.mark.parametrize("allowed", [FREE, ban(0), ban(1, 5), only(1, 2, 3, 7)])
def test_draws_follow_the_distribution_by_chi_squared(
    sampling: SamplingParams, allowed: Constraint
) -> None:
    logits_V = np.array([1.4, -0.3, 0.8, 0.1, -1.2, 0.6, -0.4, 0.2], dtype=np.float32)
    expected_V = distribution(sampling, allowed, logits_V)
    got_V = np.array(shares(sampling, allowed, logits_V))
    kept_V = expected_V > 0
    assert got_V[~kept_V].sum() == 0
    distance_V = (got_V[kept_V] - expected_V[kept_V]) ** 2 / expected_V[kept_V]
    assert DRAWS * distance_V.sum() < CHI_SQUARED_7


def distribution(sampling: SamplingParams, allowed: Constraint, logits_V: Logits) -> Doubles:
    """What each token's share should be, the slow way: everything sorted."""
    scaled_V = logits_V.astype(np.float64) / sampling.temperature
    order_V = np.argsort(-scaled_V)[: sampling.top_k]
    mass_V = np.exp(scaled_V[order_V])
    before_V = np.cumsum(mass_V) - mass_V
    kept_V = order_V[before_V < sampling.top_p * mass_V.sum()]
    share_V = np.zeros(len(logits_V))
    share_V[[token for token in kept_V if allowed.admits(token)]] = 1
    share_V *= np.exp(scaled_V)
    return share_V / share_V.sum()


@pytest.mark.parametrize("size", [1, 1000])
def test_every_place_of_a_row_can_be_drawn(size: int) -> None:
    for place in {0, size // 2, size - 1}:
        row_V = np.full(size, -1e9, dtype=np.float32)
        row_V[place] = 0
        assert Sampler(SamplingParams(temperature=1)).sample(0, 0, row_V, FREE).token == place


def test_rows_that_are_no_numbers_give_some_token() -> None:
    row_V = np.full(1000, np.nan, dtype=np.float32)
    token = Sampler(SamplingParams(temperature=1, top_p=0.9)).sample(0, 0, row_V, FREE).token
    assert 0 <= token < 1000


# Constraints

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1, 5]),
    top_p=st.sampled_from([0.2, 0.9, 1]),
    top_k=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 3),
)
ROWS = st.lists(st.integers(-4, 4), min_size=6, max_size=6)
BANNED = st.sets(st.integers(0, 5), max_size=5)


@given(SAMPLINGS, ROWS, BANNED, st.booleans())
def test_a_constraint_holds_and_is_counted_only_when_it_changed_the_choice(
    sampling: SamplingParams, row: list[int], banned: set[int], named: bool
) -> None:
    logits_V = np.array(row, dtype=np.float32)
    allowed = only(*sorted(set(range(6)) - banned)) if named else ban(*sorted(banned))
    if not banned and not named:
        allowed = FREE
    wanted = Sampler(sampling).sample(0, 0, logits_V, FREE)
    got = Sampler(sampling).sample(0, 0, logits_V, allowed)
    assert not wanted.intervened
    assert got.token not in banned
    assert got.intervened == (wanted.token in banned)
    assert wanted.token in banned or got.token == wanted.token


def test_what_a_limit_forces_is_no_intervention() -> None:
    forced = Constraint.force([3])
    assert Sampler(SamplingParams()).sample(0, 0, LOGITS, forced) == Choice(3, intervened=False)


def test_a_constraint_may_say_what_to_take_instead_of_a_banned_token() -> None:
    swapped = Constraint(np.array([0]), instead=np.array([2, 3]))
    assert Sampler(SamplingParams()).sample(0, 0, LOGITS, swapped) == Choice(2, intervened=True)
    kept = Constraint(np.array([1]), instead=np.array([2, 3]))
    assert Sampler(SamplingParams()).sample(0, 0, LOGITS, kept) == Choice(0, intervened=False)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    sampler = Sampler(SamplingParams())
    level_V = np.zeros(4, dtype=np.float32)
    assert sampler.sample(0, 0, LOGITS, FREE) == Choice(0, intervened=False)
    assert sampler.sample(0, 0, level_V, FREE).token == 0
    assert sampler.sample(0, 0, level_V, ban(0, 1)) == Choice(2, intervened=True)
    assert sampler.sample(0, 0, LOGITS, only(3, 2)) == Choice(2, intervened=True)


@given(ROWS, BANNED, st.integers(0, 99))
def test_whoever_wins_among_all_wins_among_fewer(
    row: list[int], banned: set[int], seed: int
) -> None:
    """One race: a ban takes tokens out of it and changes nobody's time, so it settles nothing new.

    The winner of the others is who would have won if the banned ones had no weight.
    """
    logits_V = np.array(row, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1, seed=seed))
    without_V = logits_V.copy()
    without_V[sorted(banned)] = -np.inf
    expected = sampler.sample(0, 0, without_V, FREE).token
    assert sampler.sample(0, 0, logits_V, ban(*sorted(banned))).token == expected


@pytest.mark.parametrize("score", [-np.inf, np.nan])
@pytest.mark.parametrize("temperature", [0, 1])
def test_where_no_score_is_a_number_the_first_allowed_token_is_taken(
    temperature: float, score: float
) -> None:
    row_V = np.full(6, score, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature))
    with np.errstate(invalid="ignore"):
        assert sampler.sample(0, 0, row_V, ban(0, 1, 3)).token == 2
        assert sampler.sample(0, 0, row_V, only(4, 5)).token == 4


# Replay


def test_a_replay_gives_each_thread_its_tokens_whatever_the_logits_say() -> None:
    segments: list[Segment] = [
        Run((11,)),
        PromiseRun((OPEN, 12, P20), 20),
        ChunkRun((ASYNC, 13, 14)),
        SyncRun(SYNC),
        Run((15,)),
    ]
    replay = Replay(segments, async_close=CLOSE, end=END)
    main = [replay.sample(0, n, LOGITS, ban(11)) for n in range(7)]
    assert main == [Choice(token, intervened=False) for token in (11, OPEN, 12, P20, SYNC, 15, END)]
    assert [replay.sample(1, n, LOGITS, FREE).token for n in range(3)] == [13, 14, CLOSE]
