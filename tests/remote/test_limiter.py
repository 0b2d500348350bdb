"""Turns over a service without steps: everybody has one, in reading order, more where they pay."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.remote.limiter import ConcurrencyLimiter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.policy import CheapestStep
from pasta_decoding.runtime.request import Request, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from tests.remote.fake import serving
from tests.remote.test_driver import assert_same
from tests.remote.writing import asked, ending, locally, scripted, service_of, writer

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PROMPTS = [(11, 12, 13 + n) for n in range(6)]


def saturated() -> CheapestStep:
    """A service at which a token takes as long as so many requests are open."""
    policy = CheapestStep()
    for width in WIDTHS:
        for _ in range(3):
            policy.learn(width, 0.01 * width)
    return policy


async def entered(limiter: ConcurrencyLimiter, answer: object, thread: int) -> asyncio.Task[None]:
    task = asyncio.create_task(limiter.enter(answer, thread))
    await asyncio.sleep(0)
    return task


def test_alone_all_threads_ask() -> None:
    async def scene() -> None:
        limiter = ConcurrencyLimiter(saturated())
        for thread in range(5):
            await (await entered(limiter, "a", thread))
        assert (limiter.open_requests, limiter.waiting) == (5, 0)

    asyncio.run(scene())


def test_of_several_each_asks_for_its_first_text_and_main_gives_way_to_a_chunk() -> None:
    async def scene() -> None:
        limiter = ConcurrencyLimiter(saturated())
        for answer in "ab":
            await (await entered(limiter, answer, MAIN))
        first = await entered(limiter, "a", 1)
        assert first.done(), "main gives its turn up"
        assert not limiter.admits("a", MAIN)
        second, main = await entered(limiter, "a", 2), await entered(limiter, "a", MAIN)
        assert not any(task.done() for task in (second, main))
        limiter.leave("a", 1)
        await second
        limiter.leave("a", 2)
        await main
        limiter.leave("b", MAIN)
        limiter.leave("a", MAIN)
        assert (limiter.open_requests, limiter.waiting) == (0, 0)

    asyncio.run(scene())


def test_where_requests_write_something_else_main_keeps_its_turn() -> None:
    async def scene() -> None:
        limiter = ConcurrencyLimiter(saturated())
        for answer in "ab":
            await (await entered(limiter, answer, MAIN))
        chunk = asyncio.create_task(limiter.enter("a", 1, main_yields=False))
        await asyncio.sleep(0)
        assert limiter.admits("a", MAIN)
        limiter.leave("a", MAIN)
        await chunk

    asyncio.run(scene())


def test_who_leaves_while_waiting_is_forgotten() -> None:
    async def scene() -> None:
        limiter = ConcurrencyLimiter(saturated())
        for answer in "ab":
            await (await entered(limiter, answer, 1))
        waiting = await entered(limiter, "a", 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert limiter.waiting == 0
        limiter.leave("a", 1)
        assert limiter.open_requests == 1

    asyncio.run(scene())


async def written_with(
    service_pool: ReplicaPool, requests: list[Request]
) -> tuple[list[Answer], ConcurrencyLimiter]:
    async with service_pool as pool:
        pool.limiter = ConcurrencyLimiter(saturated())
        tasks = [asyncio.create_task(writer(one, pool).run()) for one in requests]
        return await asyncio.gather(*tasks), pool.limiter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_service_that_is_busy_has_a_request_an_answer_and_answers_the_same(
    temperature: float,
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5))
    requests = [replace(asked(prompt), sampler=sampler) for prompt in PROMPTS]
    with serving(scripted()) as fake:
        fake.token_s = 0.001
        answers, limiter = asyncio.run(written_with(ReplicaPool(service_of(fake)), requests))
        assert fake.most_live < 2 * len(requests), "what gives way ends with its next token"
    assert (limiter.open_requests, limiter.waiting) == (0, 0)
    assert sum(answer.chunks for answer in answers) > 5
    if temperature == 0:
        for request, answer in zip(requests, answers, strict=True):
            assert_same(answer, locally(request, ending(7)))
