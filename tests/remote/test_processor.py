"""Servers with Pasta's logits processor: found out once, and then nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.guided import PROTOCOL, write_params
from pasta_decoding.lang.layout import SyncRun
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.vllm.batch import Places, Served
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SYNC
from tests.remote.fake import Body, Fake, serving
from tests.remote.test_driver import PROMPTS
from tests.remote.writing import asked, assert_same, ending, locally, scripted, service_of, write
from tests.runtime.play import ID, SIZE
from tests.vllm.tokens import Tokenizer

A, B, C = ID["a"], ID["b"], ID["c"]
HOLDS = partial(Places, Served(Tokenizer(), SIZE))


def sent(answer: Answer) -> tuple[int, int]:
    assert answer.trace.sent is not None
    return answer.trace.sent.requests, answer.trace.sent.corrections


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_costs_a_request_for_each_chunk_and_sync(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5))
    requests = [replace(asked(prompt), sampler=sampler) for prompt in PROMPTS]
    with serving(replace(scripted(), processor=HOLDS)) as fake:
        answers = write(service_of(fake), requests)
    sessions = {body["session"] for body in fake.bodies}
    assert len(sessions - {None}) == len(requests), "one a session, for routers"
    assert sum(sent(answer)[0] for answer in answers) == len(fake.bodies)
    for request, answer in zip(requests, answers, strict=True):
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert sent(answer) == (1 + answer.chunks + syncs, 0)
        if temperature == 0:
            assert_same(answer, locally(request, ending(7)))
    assert sum(answer.chunks for answer in answers) > len(requests)


def test_each_replica_is_asked_for_itself_and_one_without_it_is_sent_no_params() -> None:
    with serving(replace(scripted(), processor=HOLDS)) as one, serving(scripted()) as other:
        answers = write(service_of(one, other), [asked(prompt) for prompt in PROMPTS])
    assert len(one.checks) == len(other.checks) == 1
    assert all("vllm_xargs" in body for body in one.bodies)
    assert not any("vllm_xargs" in body for body in other.bodies)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.segments == locally(asked(prompt), ending(7)).segments
    assert sum(sent(answer)[1] for answer in answers) > 5, "the other one's are corrected"


@pytest.mark.parametrize(
    ("processor", "protocol", "message"),
    [
        (HOLDS, "0", "speaks protocol 4 of Pasta and the request another: install"),
        (
            partial(Places, Served(Tokenizer(spare=frozenset({OPEN, SYNC})), SIZE)),
            PROTOCOL,
            "the model that it serves has not the reserved tokens",
        ),
    ],
)
def test_a_processor_that_is_of_no_use_is_named_before_anything_is_asked(
    processor: Callable[[], Places], protocol: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pasta_decoding.remote.stream.write_params",
        lambda params: write_params(params).replace(PROTOCOL, protocol, 1),
    )
    with (
        serving(replace(scripted(), processor=processor)) as fake,
        pytest.raises(RemoteError, match=message),
    ):
        write(service_of(fake), [asked(PROMPTS[0])])
    assert not fake.bodies


def test_a_server_that_refuses_what_it_does_not_know_works_as_one_without() -> None:
    class Strict(Fake):
        def problem(self, body: Body) -> str | None:
            return "Unknown argument" if "vllm_xargs" in body else super().problem(body)

    with serving(Strict(ending(7), SIZE, END)) as fake:
        [answer] = write(service_of(fake), [asked(PROMPTS[0])])
        assert len(fake.checks) == 1
    assert_same(answer, locally(asked(PROMPTS[0]), ending(7)))


@pytest.mark.parametrize("guided", [True, False])
def test_eagerness_moves_promises_and_is_no_intervention(guided: bool) -> None:
    """Main would rather write b than promise, by two; it is asked to be three more eager."""

    def script(seen: tuple[int, ...]) -> FloatArray:
        logits_V = np.zeros(SIZE, dtype=np.float32)
        last, begun = seen[-1], OPEN in seen
        logits_V[{OPEN: C, C: P20, ASYNC: A, A: CLOSE, P20: END, B: END}.get(last, B)] = 9
        if last == PROMPTS[0][-1] and not begun:
            logits_V[OPEN] = 7
        return logits_V

    with serving(Fake(script, SIZE, END, processor=HOLDS if guided else None)) as fake:
        found = [
            write(service_of(fake), [asked(PROMPTS[0], rules=Rules(max_tokens=60, eagerness=by))])
            for by in (0.0, 3.0)
        ]
    told = [(answer.chunks, answer.interventions, sent(answer)[1]) for [answer] in found]
    assert told == [(0, 0, 0), (1, 0, 0)]
