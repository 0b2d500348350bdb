"""Penalties count what a thread sees: the same however its fellows are scheduled."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.decoder import answer_of
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.policy import SchedulingPolicy
from pasta_decoding.runtime.request import Request, SamplingParams
from pasta_decoding.runtime.sampler import Sampler, logprobs_of
from pasta_decoding.runtime.text import AnswerText
from tests.law.whim import EveryThread, ReadingOrder
from tests.law.world import CLOSE, END, OPEN, P20, SCHEME, SYNC
from tests.runtime.machine import RULES, A, B, C, leaning, machine
from tests.runtime.play import SIZE, VOCABULARY

MAIN_IDS = (A, B, OPEN, C, P20, B, OPEN, A, P20, A, SYNC, C)
CHUNKS = {1: (C, C, CLOSE), 2: (A, CLOSE)}


@pytest.mark.parametrize("order", list(permutations([MAIN, 1, 2])))
def test_main_sees_chunks_behind_their_sync_whoever_was_first(order: tuple[int, ...]) -> None:
    interpreter = Interpreter(VOCABULARY, SCHEME, RULES, 3)
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


def test_in_a_topic_nothing_is_penalised() -> None:
    _, scheduler = machine(leaning(0))
    sampler = Sampler(SamplingParams(repetition_penalty=1.5, logit_bias={C: 1.0}))
    generation = scheduler.add(Request((B, B, END, SYNC), sampler, RULES))
    interpreter, found = generation.interpreter, []
    for token in (A, OPEN, B, P20):
        interpreter.on_token(MAIN, token)
        adjustment = generation.row_params(MAIN).adjustment
        assert adjustment is not None
        found.append(set(adjustment.ids.tolist()))
    assert found == [{A, B, C}, {C}, {C}, {A, B, C}]


def test_each_penalty_does_what_its_name_says() -> None:
    logits_V = np.zeros(SIZE, dtype=np.float32)
    logits_V[[A, B, C]] = 4, -4, 1
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    adjustment = Sampler(params).row(MAIN, 3, {C: 3.0, END: -1.0}, (A, A, C), {B}).adjustment
    assert adjustment is not None
    got_V = adjustment.apply(logits_V)
    assert got_V[[A, B, C, END]].tolist() == [2 - 0.5 - 0.5, -8, 0.5 - 0.75 + 3, -1]
    assert np.count_nonzero(got_V) == 4
    assert logits_V[A] == 4


def test_logprobs_are_the_models_own() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    found = logprobs_of(np.log(probabilities).astype(np.float32) + 3, 2, 2)
    assert (found.token, [token for token, _ in found.top]) == (2, [0, 1])
    expected = np.log([0.15, 0.5, 0.25])
    assert [found.logprob, *(one for _, one in found.top)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_penalties_and_logprobs_do_not_depend_on_who_writes_when(seed: int) -> None:
    sampling = SamplingParams(1, repetition_penalty=1.5, frequency_penalty=1, seed=seed, logprobs=2)
    sampler = Sampler(sampling)
    request = Request((A, B), sampler, RULES)

    def told(policy: SchedulingPolicy) -> tuple[object, ...]:
        _, scheduler = machine(leaning(seed), policy=policy)
        found, fold = answer_of(scheduler, request), AnswerText()
        assert "".join(map(fold.feed, found.events)) == found.text
        # How a text is cut into pieces depends on when a chunk's end was known, its tokens do not.
        return found.layout.tokens, [one.logprobs for one in fold.take_tokens()]

    wide, narrow = told(EveryThread()), told(ReadingOrder())
    assert wide == narrow
