"""Servers with Pasta's logits processor: found out once, and then nothing is taken back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.engines.scripted import follow
from pasta_decoding.lang.layout import SyncRun
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.limiter import ConcurrencyLimiter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.runtime import guided
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.guided import XARG
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.vllm.batch import UNKNOWN, Places, Served
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, P50, SYNC
from tests.remote.fake import Fake, refusal, serving
from tests.remote.test_driver import LAST, LONG_PROMPT, PROMPTS, SPACE_A, TWO_CHUNKS, assert_same
from tests.remote.test_limiter import saturated
from tests.remote.writing import asked, ending, locally, scripted, service_of, write, writer
from tests.runtime.play import ID, SIZE
from tests.vllm.tokens import Tokenizer

A, B, C = ID["a"], ID["b"], ID["c"]


def holding(fake: Fake, tokenizer: Tokenizer | None = None) -> Fake:
    """Give a server the processor, over a tokenizer."""
    fake.processor = partial(Places, Served(tokenizer or Tokenizer(), SIZE))
    return fake


def sent(answer: Answer) -> tuple[int, int]:
    assert answer.trace.sent is not None
    return answer.trace.sent.requests, answer.trace.sent.corrections


def test_answers_are_the_same_and_cost_a_request_for_each_chunk_and_sync() -> None:
    requests = [asked(prompt) for prompt in PROMPTS]
    with serving(holding(scripted())) as fake:
        answers = [write(service_of(fake), [request])[0] for request in requests]
        assert {body["priority"] for body in fake.bodies} > {0}
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, locally(request, ending(7)))
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert sent(answer) == (1 + answer.chunks + syncs, 0)
    assert sum(locally(request, ending(7)).interventions for request in requests) > 20


@pytest.mark.parametrize("clients", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_together_cost_no_more_requests_each(clients: int, temperature: float) -> None:
    """At a server of which the limiter believes that a wider step is never cheaper."""
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5))
    requests = [
        replace(asked((11, 12, 13 + n % 40)), sampler=sampler) for n in range(max(4, clients))
    ]
    with serving(holding(scripted())) as fake:
        answers, begun = asyncio.run(written_by(clients, ReplicaPool(service_of(fake)), requests))
    for request, answer, chunks in zip(requests, answers, begun, strict=True):
        assert not answer.hit_limit
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert chunks == answer.chunks
        assert sent(answer) == (1 + chunks + syncs, 0)
        if temperature == 0:
            assert_same(answer, locally(request, ending(7)))
    assert sum(begun) > len(requests)


async def written_by(
    clients: int, service_pool: ReplicaPool, requests: list[Request]
) -> tuple[list[Answer], list[int]]:
    """Write so many at a time; return the answers, and how many chunks each began."""
    async with service_pool as pool:
        pool.limiter = ConcurrencyLimiter(saturated())
        room = asyncio.Semaphore(clients)
        writers = [writer(request, pool) for request in requests]

        async def write_one(one: AnswerWriter) -> Answer:
            async with room:
                return await one.run()

        answers = await asyncio.gather(*map(write_one, writers))
        assert (pool.limiter.open_requests, pool.limiter.waiting) == (0, 0)
    return answers, [len(one.interpreter.budget.chunks) for one in writers]


FILLED = follow(
    (LAST, A, OPEN, B, P50, SPACE_A, OPEN, C, P20, B, SYNC),
    (P50, ASYNC, *[C] * 60),
    (P20, ASYNC, C, A, CLOSE),
    vocabulary_size=SIZE,
)


def test_beside_others_what_will_probably_be_trimmed_is_not_asked_for() -> None:
    """The first chunk fills the answer; the second one would stand beyond its limit."""
    rules = Rules(max_tokens=20, max_topic_tokens=3, min_chunk_tokens=6)
    two, alone = asked(LONG_PROMPT, rules=rules), asked(LONG_PROMPT, rules=rules)
    with serving(holding(Fake(FILLED, SIZE, END))) as fake:
        [answer] = write(service_of(fake), [alone])
        assert prompts_of_chunks(fake) == 2
        fake.bodies.clear()
        answers = write(service_of(fake), [two, alone])
        assert prompts_of_chunks(fake) < 4
    for one in answers:
        assert one.segments == answer.segments == locally(alone, FILLED).segments
        assert one.hit_limit


def prompts_of_chunks(fake: Fake) -> int:
    """How many requests write a chunk from its beginning."""
    return sum(body["prompt"][-1] == ASYNC for body in fake.bodies)


def test_one_without_the_processor_gets_no_params_and_is_corrected() -> None:
    with serving(scripted()) as fake:
        answers = write(service_of(fake), [asked(prompt) for prompt in PROMPTS])
        assert len(fake.checks) == 1
        assert not any("vllm_xargs" in body for body in fake.bodies)
    assert sum(sent(answer)[1] for answer in answers) > 10


def test_each_replica_is_asked_for_itself() -> None:
    with serving(holding(scripted())) as one, serving(scripted()) as other:
        answers = write(service_of(one, other), [asked(prompt) for prompt in PROMPTS])
        assert len(one.checks) == len(other.checks) == 1
        assert one.bodies
        assert other.bodies
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_same_text(answer, locally(asked(prompt), ending(7)))


def assert_same_text(ours: Answer, theirs: Answer) -> None:
    assert ours.segments == theirs.segments
    assert ours.layouts == theirs.layouts


def test_one_that_comes_back_is_asked_again() -> None:
    fake = scripted()
    rules = Rules(max_tokens=60, max_topic_tokens=3, min_chunk_tokens=6)

    async def written() -> None:
        async with ReplicaPool(service_of(fake)) as pool:
            await writer(asked(PROMPTS[0], rules=rules), pool).run()
            fake.mischief = lambda _body, _pieces: refusal(500, "gone")
            with pytest.raises(RemoteError, match="gone"):
                await writer(asked(PROMPTS[0], rules=rules), pool).run()
            fake.mischief = None
            holding(fake).bodies.clear()
            await writer(asked(PROMPTS[0], rules=rules), pool).run()

    with serving(fake):
        asyncio.run(written())
        assert len(fake.checks) > 1
        assert all("vllm_xargs" in body for body in fake.bodies)


def failure(fake: Fake) -> RemoteError:
    with serving(fake), pytest.raises(RemoteError) as error:
        write(service_of(fake), [asked(PROMPTS[0])])
    assert not fake.bodies
    return error.value


def test_another_version_of_pasta_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = guided.write_params
    changed = lambda guide: written(guide).replace('"protocol":2', '"protocol":3')  # noqa: E731
    monkeypatch.setattr("pasta_decoding.remote.stream.write_params", changed)
    error = failure(holding(scripted()))
    assert "speaks protocol 2 of Pasta and the request another: install the same" in str(error)


def test_a_model_without_the_reserved_tokens_is_refused() -> None:
    error = failure(holding(scripted(), Tokenizer(spare=frozenset({OPEN, SYNC}))))
    assert "the model that it serves has not the reserved tokens" in str(error)


def test_a_processor_that_does_not_see_what_is_written_is_refused() -> None:
    class Blind(Places):
        def update(self, change: Any) -> None:
            [(row, params, prompt, _)] = change.added
            change.added = [(row, params, prompt, Unseen(_))]
            super().update(change)

    fake = scripted()
    fake.processor = lambda: Blind(Served(Tokenizer(), SIZE))
    error = failure(fake)
    assert "is not shown the tokens" in str(error)


class Unseen(list[int]):
    """An output of which no token has come back."""

    def __init__(self, output: list[int]) -> None:
        super().__init__()
        self._output = output

    def __bool__(self) -> bool:
        return bool(self._output)

    def __getitem__(self, _place: Any) -> Any:
        return UNKNOWN


def test_a_server_that_refuses_what_it_does_not_know_works_as_one_without() -> None:
    class Strict(Fake):
        def _problem(self, body: dict[str, Any]) -> str | None:
            known = not {"vllm_xargs", "priority"} & body.keys()
            return super()._problem(body) if known else "Unrecognized request argument"

    with serving(Strict(ending(7), SIZE, END)) as fake:
        [answer] = write(service_of(fake), [asked(PROMPTS[0])])
        assert len(fake.checks) == 2
    assert_same(answer, locally(asked(PROMPTS[0]), ending(7)))


def test_a_server_without_priorities_is_sent_none() -> None:
    class Fifo(Fake):
        def _problem(self, body: dict[str, Any]) -> str | None:
            return "no priorities" if body.get("priority") else super()._problem(body)

    with serving(holding(Fifo(ending(7), SIZE, END))) as fake:
        [answer] = write(service_of(fake), [asked(PROMPTS[0])])
        assert not any("priority" in body for body in fake.bodies)
    assert sent(answer)[1] == 0


def test_priorities_follow_reading_order() -> None:
    with serving(Fake(TWO_CHUNKS, SIZE, END)) as fake:
        write(service_of(fake), [asked(LONG_PROMPT)])
        found = sorted((len(body["prompt"]), body["priority"]) for body in fake.bodies)
    assert [priority for _, priority in found] == [0, 0, 1, 0]


def test_requests_of_an_answer_name_its_session_and_no_other() -> None:
    with serving(holding(scripted())) as fake:
        answers = write(service_of(fake), [asked(prompt) for prompt in PROMPTS[:3]])
        sessions = set(fake.sessions)
    assert len(sessions) == 3
    assert None not in sessions
    assert sum(sent(answer)[0] for answer in answers) == len(fake.sessions) > 6


def test_a_promise_asks_before_mains_next_token_comes() -> None:
    """Main's server sends the closing token, and nothing more until the chunk is asked for."""
    fake = Fake(TWO_CHUNKS, SIZE, END)

    async def waiting(body: dict[str, Any], pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield piece
            if f'"token_ids": [{P20}]'.encode() in piece and ASYNC not in body["prompt"]:
                async with asyncio.timeout(60):
                    while not any(one["prompt"][-2:] == [P20, ASYNC] for one in fake.bodies):
                        await asyncio.sleep(0.001)

    fake.mischief = waiting
    with serving(fake):
        [answer] = write(service_of(fake), [asked(LONG_PROMPT)])
    assert answer.chunks == 2


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

    with serving(Fake(script, SIZE, END)) as fake:
        if guided:
            holding(fake)
        found = [
            write(service_of(fake), [asked(PROMPTS[0], rules=Rules(max_tokens=60, eagerness=by))])
            for by in (0.0, 3.0)
        ]
    assert [answer.chunks for [answer] in found] == [0, 1]
    assert [answer.interventions for [answer] in found] == [0, 0]
    assert [sent(answer)[1] for [answer] in found] == [0, 0]


def test_what_is_sent_says_what_a_thread_cannot_know() -> None:
    with serving(holding(Fake(TWO_CHUNKS, SIZE, END))) as fake:
        write(service_of(fake), [asked(LONG_PROMPT)])
        told = [json.loads(body["vllm_xargs"][XARG]) for body in fake.bodies]
    ordered = sorted(zip((len(body["prompt"]) for body in fake.bodies), told, strict=True), key=str)
    kinds = [
        (one["kind"], one["sync"], one["topics"]) for _, one in sorted(ordered, key=lambda p: p[0])
    ]
    assert kinds == [
        ("main", False, []),
        ("chunk", False, []),
        ("chunk", False, []),
        ("main", False, ["b", "c"]),
    ]
