"""Requests to servers, several at a time, for a caller that knows no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from pasta_decoding.remote.driver import AnswerWriter, OnNews
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.service import Service
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.request import Request


class Asker(Protocol):
    """What a `RemoteDecoder` does for a scheduler."""

    @property
    def service(self) -> Service:
        """Where requests go."""
        ...

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could never be answered."""
        ...

    def writer(self, request: Request, pool: ReplicaPool, on_news: OnNews) -> AnswerWriter:
        """Return what writes the answer to a request that passed `check`."""
        ...


class RemoteScheduler:
    """Implements `RequestScheduler`. Not for several threads, nor where an event loop runs already.

    Answers go on while one of its methods runs: `step` waits until at least one is over.
    """

    def __init__(self, decoder: Asker) -> None:
        self._decoder = decoder
        self._runner = asyncio.Runner()
        self._pool: ReplicaPool | None = None
        self._numbers = count()
        self._tasks: dict[int, asyncio.Task[Answer]] = {}

    def add(self, request: Request) -> int:
        """See `RequestScheduler`."""
        return self.add_together([request])[0]

    def add_together(self, requests: Sequence[Request]) -> list[int]:
        """See `RequestScheduler`. What their prompts share is up to the servers' prefix caches."""
        for request in requests:
            self._decoder.check(request)
        tasks = self._runner.run(self._start(requests))
        numbers = [next(self._numbers) for _ in tasks]
        self._tasks |= zip(numbers, tasks, strict=True)
        return numbers

    def step(self) -> None:
        """Wait until an answer is over that was not; at once if none is under way."""
        under_way = [task for task in self._tasks.values() if not task.done()]
        if under_way:
            self._runner.run(_first_of(under_way))

    def result(self, number: int) -> Answer | None:
        """See `RequestScheduler`. Raises RemoteError if the servers failed."""
        task = self._tasks[number]
        return task.result() if task.done() else None

    def forget(self, number: int) -> None:
        """See `RequestScheduler`."""
        self._runner.run(_cancelled([self._tasks.pop(number)]))

    def close(self) -> None:
        """Cancel everything and end all connections; it is of no use afterwards."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        try:
            self._runner.run(_cancelled(tasks))
            if self._pool is not None:
                self._runner.run(self._pool.__aexit__())
        finally:
            self._runner.close()

    async def _start(self, requests: Sequence[Request]) -> list[asyncio.Task[Answer]]:
        if self._pool is None:
            self._pool = await ReplicaPool(self._decoder.service).__aenter__()
        writers = [self._decoder.writer(one, self._pool, lambda *_: None) for one in requests]
        return [asyncio.create_task(writer.run()) for writer in writers]


async def _first_of(tasks: Sequence[asyncio.Task[Answer]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(tasks: Sequence[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
