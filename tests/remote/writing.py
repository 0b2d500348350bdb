"""Helpers that write answers at fake servers, and the same answers on an engine here."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pasta_decoding.answer.events import Progress
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines.base import FloatArray
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.remote.client import ReplicaPool, Service
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer.play import SIZE, VOCABULARY
from tests.law.world import END
from tests.remote.fake import Fake
from tests.scheduling.machine import leaning, ordered
from tests.scripted import Script, ScriptedEngine

RULES = Rules(max_tokens=400, max_topic_tokens=3, min_chunk_tokens=6)


def ending(seed: int) -> Script:
    """Return a script of a random answer with promises and syncs that soon ends."""
    script = leaning(seed)

    def leaning_to_end(seen: tuple[int, ...]) -> FloatArray:
        logits_V = script(seen).copy()
        logits_V[END] += 2
        return logits_V

    return leaning_to_end


def scripted(seed: int = 7) -> Fake:
    return Fake(ending(seed), SIZE, END)


def service_of(*fakes: Fake, **limits: float) -> Service:
    urls = tuple(fake.url for fake in fakes)
    settings: dict[str, Any] = {"retries": 2, "pause_s": 0.01, "cooldown_s": 0.2} | limits
    return Service(urls, fakes[0].model, fakes[0].vocabulary_size, 4096, **settings)


def request_for(prompt: Sequence[int], *, rules: Rules = RULES, **limits: Any) -> Request:
    return Request(tuple(prompt), Sampler(SamplingParams()), replace(rules, **limits))


OnNews = Callable[[Progress], object]


def writer(
    request: Request, pool: ReplicaPool, on_news: OnNews = lambda _news: None
) -> AnswerWriter:
    """Return a writer that passes its news to `on_news` as soon as they come."""

    def drain() -> None:
        if news := answer_writer.drain():
            on_news(news)

    answer_writer = AnswerWriter(request, VOCABULARY, pool, drain)
    return answer_writer


async def written(
    service: Service, requests: Sequence[Request], on_news: OnNews = lambda _news: None
) -> list[Answer]:
    """Write all answers at the same time."""
    async with aclosing(ReplicaPool(service)) as pool:
        try:
            async with asyncio.TaskGroup() as group:
                writers = [writer(request, pool, on_news) for request in requests]
                tasks = [group.create_task(answer_writer.run()) for answer_writer in writers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def write(service: Service, requests: Sequence[Request], **options: Any) -> list[Answer]:
    return asyncio.run(written(service, requests, **options))


def locally(request: Request, script: Script) -> Answer:
    """Return the answer that the step scheduler writes here under the text join."""
    engine = ScriptedEngine(script, SIZE)
    scheduler = Scheduler(engine, VOCABULARY, SHARED_MAX, joining=Joining.text)
    return answer_of(scheduler, request)


def assert_same(ours: Answer, theirs: Answer) -> None:
    assert ours.segments == theirs.segments
    assert ours.layouts == theirs.layouts
    assert ours.text == theirs.text
    assert ours.critical_path == theirs.critical_path
    assert sorted(ours.trace.fed, key=repr) == sorted(theirs.trace.fed, key=repr)
    assert ours.trace.rewritten_tokens == theirs.trace.rewritten_tokens
    assert ordered(ours.events) == ours.text
