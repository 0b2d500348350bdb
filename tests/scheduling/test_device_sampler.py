"""What is sampled where the logits are is what would have been sampled of a copy of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler, sample_token
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.scheduling.device_sampler import sample_tokens
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.law.world import OPEN, SCHEME
from tests.scheduling.machine import A, B, finish
from tests.tiny import tiny_llama

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1, 4]),
    top_p=st.sampled_from([1e-46, 0.05, 0.5, 0.9, 1]),
    top_k=st.sampled_from([None, 1, 3, 40, 2000]),
    seed=st.integers(0, 9),
)


@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([7, 1000]))
def test_a_device_draws_what_the_host_would(
    samplings: list[SamplingParams], seed: int, size: int
) -> None:
    rows_FV = 2 * np.random.default_rng(seed).standard_normal((len(samplings), size))
    logits_FV = rows_FV.astype(np.float32)
    rows = [Sampler(params, number).row(number, 3, {}) for number, params in enumerate(samplings)]
    expected = [sample_token(logits_V, row) for logits_V, row in zip(logits_FV, rows, strict=True)]
    assert sample_tokens(torch.from_numpy(logits_FV), rows) == expected


def test_rows_that_are_no_numbers_give_some_token_and_leave_the_others_theirs() -> None:
    logits_FV = np.zeros((2, 1000), dtype=np.float32)
    logits_FV[0] = np.nan
    params = SamplingParams(temperature=1, top_p=0.9, top_k=900)
    draws = [Sampler(params, row).row(0, 0, {}) for row in range(2)]
    first, second = sample_tokens(torch.from_numpy(logits_FV), draws)
    assert 0 <= first < 1000
    assert second == sample_token(logits_FV[1], draws[1])


class Remote(TorchEngine):
    """As if it had a device of its own: `step` would move whole rows of logits."""

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        raise AssertionError(f"{len(feeds)} rows were moved")


BIAS = SamplingParams(1, logit_bias={OPEN: 1.0, A: 1.0})
PENALTIES = replace(BIAS, repetition_penalty=1.3, frequency_penalty=1)


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize(
    ("sampling", "eagerness", "chunks"),
    [
        (SamplingParams(top_p=0.95), None, None),
        (PENALTIES, None, None),
        (BIAS, -100, 0),
        (BIAS, 0, None),
        (BIAS, 100, 4),
    ],
)
def test_answers_are_the_same_wherever_their_tokens_are_sampled(
    sampling: SamplingParams, eagerness: float | None, chunks: int | None, temperature: float
) -> None:
    model, answers = tiny_llama(vocabulary=SIZE), []
    remote = Remote(model)
    remote.keeps_logits = True
    for engine in (remote, TorchEngine(model)):
        scheduler = Scheduler(engine, VOCABULARY, SCHEME)
        numbers = []
        for number in range(3):
            sampler = Sampler(replace(sampling, temperature=temperature), number)
            rules = Rules(60, max_chunks=4, topic=eagerness is None, eagerness=eagerness)
            numbers.append(scheduler.add(Request((A, B + number), sampler, rules)))
        answers.append(finish(scheduler, numbers))
    there, here = answers
    assert [answer.layouts for answer in there] == [answer.layouts for answer in here]
    assert [answer.interventions for answer in there] == [answer.interventions for answer in here]
    assert sum(answer.interventions for answer in here) > 0
    assert chunks in (None, here[0].chunks)
