"""Turns over a service without steps: everybody has one, in reading order, more where they pay."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.turnstile import Turnstile
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.governor import CheapestStep
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.sampling import Sampler, Sampling
from tests.remote.fake import serving
from tests.remote.test_driver import assert_same
from tests.remote.writing import asked, ending, locally, scripted, service_of, writer

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PROMPTS = [(11, 12, 13 + n) for n in range(6)]


def saturated() -> CheapestStep:
    """A service at which a token takes as long as so many requests are open."""
    governor = CheapestStep()
    for width in WIDTHS:
        for _ in range(3):
            governor.learn(width, 0.01 * width)
    return governor


async def entered(turnstile: Turnstile, answer: object, thread: int) -> asyncio.Task[None]:
    task = asyncio.create_task(turnstile.enter(answer, thread))
    await asyncio.sleep(0)
    return task


def test_alone_all_threads_ask() -> None:
    async def scene() -> None:
        turnstile = Turnstile(saturated())
        for thread in range(5):
            await (await entered(turnstile, "a", thread))
        assert (turnstile.open_requests, turnstile.waiting) == (5, 0)

    asyncio.run(scene())


def test_of_several_each_asks_for_its_first_text_and_main_gives_way_to_a_chunk() -> None:
    async def scene() -> None:
        turnstile = Turnstile(saturated())
        for answer in "ab":
            await (await entered(turnstile, answer, MAIN))
        first = await entered(turnstile, "a", 1)
        assert first.done(), "main gives its turn up"
        assert not turnstile.admits("a", MAIN)
        second, main = await entered(turnstile, "a", 2), await entered(turnstile, "a", MAIN)
        assert not any(task.done() for task in (second, main))
        turnstile.leave("a", 1)
        await second
        turnstile.leave("a", 2)
        await main
        turnstile.leave("b", MAIN)
        turnstile.leave("a", MAIN)
        assert (turnstile.open_requests, turnstile.waiting) == (0, 0)

    asyncio.run(scene())


def test_where_requests_write_something_else_main_keeps_its_turn() -> None:
    async def scene() -> None:
        turnstile = Turnstile(saturated())
        for answer in "ab":
            await (await entered(turnstile, answer, MAIN))
        chunk = asyncio.create_task(turnstile.enter("a", 1, main_yields=False))
        await asyncio.sleep(0)
        assert turnstile.admits("a", MAIN)
        turnstile.leave("a", MAIN)
        await chunk

    asyncio.run(scene())


def test_who_leaves_while_waiting_is_forgotten() -> None:
    async def scene() -> None:
        turnstile = Turnstile(saturated())
        for answer in "ab":
            await (await entered(turnstile, answer, 1))
        waiting = await entered(turnstile, "a", 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert turnstile.waiting == 0
        turnstile.leave("a", 1)
        assert turnstile.open_requests == 1

    asyncio.run(scene())


async def written_with(
    service_pool: ReplicaPool, requests: list[Request]
) -> tuple[list[Answer], Turnstile]:
    async with service_pool as pool:
        pool.turnstile = Turnstile(saturated())
        tasks = [asyncio.create_task(writer(one, pool).run()) for one in requests]
        return await asyncio.gather(*tasks), pool.turnstile


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_service_that_is_busy_has_a_request_an_answer_and_answers_the_same(
    temperature: float,
) -> None:
    sampler = Sampler(Sampling(temperature=temperature, seed=5))
    requests = [replace(asked(prompt), chooser=sampler) for prompt in PROMPTS]
    with serving(scripted()) as fake:
        fake.token_s = 0.001
        answers, turnstile = asyncio.run(written_with(ReplicaPool(service_of(fake)), requests))
        assert fake.most_live < 2 * len(requests), "what gives way ends with its next token"
    assert (turnstile.open_requests, turnstile.waiting) == (0, 0)
    assert sum(answer.chunks for answer in answers) > 5
    if temperature == 0:
        for request, answer in zip(requests, answers, strict=True):
            assert_same(answer, locally(request, ending(7)))
