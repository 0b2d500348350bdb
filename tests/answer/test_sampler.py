"""Choosing tokens: noise depends on its key alone, constraints always hold; penalties."""

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.constraints import NO_IDS, Constraint, Topics
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Logits, SampledToken, Sampler, logprobs_of, sample_token
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.answer.text import AnswerText
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.policy import SchedulingPolicy
from tests.answer.play import SIZE, VOCABULARY
from tests.law.whim import EveryThread, ReadingOrder
from tests.law.world import CLOSE, END, OPEN, P20, SCHEME, SYNC
from tests.scheduling.machine import RULES, A, B, C, leaning, machine

FREE = Constraint(NO_IDS)
LOGITS: Logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
DRAWS = 800
Doubles = npt.NDArray[np.float64]


def ban(*ids: int) -> Constraint:
    return Constraint(np.array(ids))


def only(*ids: int) -> Constraint:
    return Constraint(NO_IDS, only=np.array(ids))


def sample(
    sampler: Sampler, index: int, logits_V: Logits, allowed: Constraint = FREE, thread: int = 0
) -> SampledToken:
    row = sampler.row(thread, index, allowed.bias)
    return sampler.accept(row, sample_token(logits_V, row), lambda: logits_V, allowed)


def shares(
    sampling: SamplingParams, allowed: Constraint = FREE, logits_V: Logits = LOGITS
) -> list[float]:
    """How often each token was drawn."""
    sampler = Sampler(sampling)
    drawn = Counter(sample(sampler, n, logits_V, allowed).token for n in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(logits_V))]


def line(sampler: Sampler, thread: int = 0) -> list[int]:
    flat_V = np.zeros(1000, dtype=np.float32)
    return [sample(sampler, n, flat_V, thread=thread).token for n in range(8)]


# Noise


def test_noise_is_of_its_whole_key_and_of_nothing_else() -> None:
    sampling = SamplingParams(temperature=1)
    flat_V = np.zeros(1000, dtype=np.float32)
    again = Sampler(sampling)
    backwards = [sample(again, n, flat_V).token for n in reversed(range(8))]
    lines = [
        line(Sampler(sampling)),
        line(Sampler(SamplingParams(temperature=1, seed=1))),
        line(Sampler(sampling, request=1)),
        line(Sampler(sampling), thread=1),
    ]
    assert lines[1] == line(Sampler(replace(sampling, seed=cast("int", np.int64(1))))), (
        "a number of numpy's"
    )
    assert lines[0] == line(again) == backwards[::-1]
    assert len({tuple(tokens) for tokens in lines}) == 4
    assert all(len(set(tokens)) > 1 for tokens in lines)


# Frequencies: with 800 draws the standard error of a share is below 0.018.


def test_ties_at_the_border_stay_in() -> None:
    level_V = np.zeros(4, dtype=np.float32)
    assert min(shares(SamplingParams(temperature=1, top_k=2), logits_V=level_V)) > 0
    assert min(shares(SamplingParams(temperature=1, top_p=0.3), logits_V=level_V)) > 0


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
    unconstrained = sample(Sampler(sampling), 0, logits_V)
    constrained = sample(Sampler(sampling), 0, logits_V, allowed)
    assert not unconstrained.intervened
    assert constrained.token not in banned
    assert constrained.intervened == (unconstrained.token in banned)
    assert unconstrained.token in banned or constrained.token == unconstrained.token


@pytest.mark.parametrize(
    ("allowed", "token", "intervened"),
    [
        (FREE, 0, False),
        (ban(0, 1), 2, True),
        (only(3, 2), 2, True),
        (Constraint.force([3]), 3, False),  # by a limit
        (Constraint(np.array([0]), substitutes=np.array([2, 3])), 2, True),
        (Constraint(np.array([1]), substitutes=np.array([2, 3])), 0, False),
        (Constraint(NO_IDS, bias={3: 50.0}), 3, False),  # as if the model had wanted it
    ],
)
@pytest.mark.parametrize("temperature", [0, 5e-324, 0.01])
def test_greedy_takes_the_largest_that_may_stand(
    temperature: float, allowed: Constraint, token: int, intervened: bool
) -> None:
    sampler = Sampler(SamplingParams(temperature))
    assert sample(sampler, 0, LOGITS, allowed) == SampledToken(token, intervened)
    level_V = np.zeros(4, dtype=np.float32)
    assert temperature > 0.001 or sample(sampler, 0, level_V).token == 0


@given(ROWS, BANNED, st.integers(0, 99))
def test_a_winner_among_all_tokens_wins_among_fewer(
    row: list[int], banned: set[int], seed: int
) -> None:
    """A ban takes tokens out of the race and leaves the times of the others as they are.

    So the winner is the same as if the banned tokens had no weight.
    """
    logits_V = np.array(row, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1, seed=seed))
    without_V = logits_V.copy()
    without_V[sorted(banned)] = -np.inf
    expected = sample(sampler, 0, without_V).token
    assert sample(sampler, 0, logits_V, ban(*sorted(banned))).token == expected


@pytest.mark.parametrize("score", [-np.inf, np.nan])
@pytest.mark.parametrize("temperature", [0, 1])
def test_where_no_score_is_a_number_the_first_allowed_token_is_taken(
    temperature: float, score: float
) -> None:
    row_V = np.full(6, score, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature))
    with np.errstate(invalid="ignore"):
        assert sample(sampler, 0, row_V, ban(0, 1, 3)).token == 2
        assert sample(sampler, 0, row_V, only(4, 5)).token == 4


# Penalties count the tokens that a thread sees, which do not depend on scheduling


MAIN_IDS = (A, B, OPEN, C, P20, B, OPEN, A, P20, A, SYNC, C)
CHUNKS = {1: (C, C, CLOSE), 2: (A, CLOSE)}


@pytest.mark.parametrize("order", list(permutations([MAIN, 1, 2])))
def test_main_sees_chunks_behind_their_sync_whoever_was_first(order: tuple[int, ...]) -> None:
    interpreter = Interpreter(VOCABULARY, SCHEME, RULES, 3, 1000)
    lines = {MAIN: MAIN_IDS[9:11], **CHUNKS}
    for token in MAIN_IDS[:9]:
        interpreter.on_token(MAIN, token)
    for thread in order:
        for token in lines[thread]:
            interpreter.on_token(thread, token)
    interpreter.on_token(MAIN, C)
    assert Counter(interpreter.text_seen(MAIN)) == Counter({A: 3, B: 2, C: 3})
    assert Counter(interpreter.text_seen(1)) == Counter({A: 1, B: 1, C: 2})
    assert Counter(interpreter.text_seen(2)) == Counter({A: 2, B: 2})


def test_in_a_topic_nothing_is_penalised_or_wished_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topics, "constraint", None)  # it is slow, and needed only later
    _, scheduler = machine(leaning(0))
    sampler = Sampler(SamplingParams(repetition_penalty=1.5, logit_bias={C: 1.0}))
    rules = replace(RULES, eagerness=1.0)
    generation = scheduler.add(Request((B, B, END, SYNC), sampler, rules))
    interpreter = generation.interpreter
    adjusted_ids = []
    for token in (A, OPEN, B, P20):
        interpreter.on_token(MAIN, token)
        adjustment = generation.row_params(MAIN).adjustment
        assert adjustment is not None
        adjusted_ids.append(set(adjustment.ids.tolist()))
    assert adjusted_ids == [{A, B, C, OPEN}, {C}, {C}, {A, B, C, OPEN}]


def test_each_penalty_does_what_its_name_says() -> None:
    logits_V = np.zeros(SIZE, dtype=np.float32)
    logits_V[[A, B, C]] = 4, -4, 1
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    adjustment = (
        Sampler(params).row(MAIN, 3, {C: 3.0, END: -1.0}, (A, A, C), np.array([B])).adjustment
    )
    assert adjustment is not None
    got_V = adjustment.apply(logits_V)
    assert got_V[[A, B, C, END]].tolist() == [2 - 0.5 - 0.5, -8, 0.5 - 0.75 + 3, -1]
    assert np.count_nonzero(got_V) == 4
    assert logits_V[A] == 4


def test_logprobs_are_the_models_own() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logprobs = logprobs_of(np.log(probabilities).astype(np.float32) + 3, 2, 2)
    assert logprobs.token == 2
    top_ids, top_logprobs = zip(*logprobs.top, strict=True)
    assert top_ids == (0, 1)
    expected = np.log([0.15, 0.5, 0.25])
    assert [logprobs.logprob, *top_logprobs] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_penalties_and_logprobs_do_not_depend_on_who_writes_when(seed: int) -> None:
    sampling = SamplingParams(1, repetition_penalty=1.5, frequency_penalty=1, seed=seed, logprobs=2)
    sampler = Sampler(sampling)
    request = Request((A, B), sampler, RULES)

    def tokens_under(policy: SchedulingPolicy) -> tuple[object, ...]:
        _, scheduler = machine(leaning(seed), policy=policy)
        answer = answer_of(scheduler, request)
        text = AnswerText()
        assert "".join(map(text.feed, answer.events)) == answer.text
        # Where the text is cut into pieces depends on the policy; its tokens do not.
        return answer.layouts, [token.logprobs for token in text.take_tokens()]

    assert tokens_under(EveryThread()) == tokens_under(ReadingOrder())
