"""Eagerness: one number that is added to the promise's logit wherever main may promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, Joining
from pasta_decoding.runtime.constraints import NOTHING, Constraint
from pasta_decoding.runtime.local import answer_of
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Choice, Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from tests.law.world import OPEN, SCHEME
from tests.runtime.machine import A, B
from tests.runtime.play import SIZE, VOCABULARY, cycle, play_steps
from tests.tiny import tiny_llama


@given(st.lists(st.integers(0, SIZE - 1), min_size=1), st.integers(0, 30), st.booleans())
def test_the_promise_is_biased_where_main_may_write_it_and_nowhere_else(
    tokens: list[int], steps: int, parallel: bool
) -> None:
    rules = Rules(40, max_chunks=3, min_chunk_tokens=6, parallel=parallel, eagerness=2.0)
    for joining in Joining:
        interpreter = play_steps(rules, cycle(tokens), steps, joining=joining).interpreter
        for thread in interpreter.writing:
            allowed = interpreter.constraint(thread)
            promises = thread == MAIN and allowed.admits(OPEN)
            assert allowed.bias == ({OPEN: 2.0} if promises else {})


def test_it_counts_as_the_models_own_wish() -> None:
    level_V = np.zeros(SIZE, dtype=np.float32)
    allowed = Constraint(NOTHING, bias={OPEN: 50.0})
    for temperature in (0, 1):
        choice = Sampler(SamplingParams(temperature)).sample(MAIN, 0, level_V, allowed)
        assert choice == Choice(OPEN, intervened=False)


@pytest.mark.parametrize(("eagerness", "chunks"), [(-100, 0), (0, None), (100, 4)])
@pytest.mark.parametrize("temperature", [0, 1])
def test_it_is_the_same_on_host_and_device(
    temperature: float, eagerness: float, chunks: int | None
) -> None:
    rules = Rules(60, max_chunks=4, topic=False, eagerness=eagerness)
    answers = []
    for keeps_logits in (False, True):
        engine = TorchEngine(tiny_llama(vocabulary=SIZE), keeps_logits=keeps_logits)
        request = Request(
            (A, B), Sampler(SamplingParams(temperature, logit_bias={OPEN: 1.0})), rules
        )
        answers.append(answer_of(Scheduler(engine, VOCABULARY, SCHEME), request))
    assert answers[0].layout == answers[1].layout
    assert chunks in (None, answers[0].chunks)


@pytest.mark.parametrize("eagerness", [101.0, -101.0, float("nan")])
def test_a_number_without_a_meaning_is_refused(eagerness: float) -> None:
    with pytest.raises(PastaError, match=r"eagerness .* is not between -100 and 100"):
        Rules(eagerness=eagerness)
