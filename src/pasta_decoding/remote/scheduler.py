"""Requests to servers, several at a time, for a caller that goes on step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from queue import SimpleQueue

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.worker import Failure, News, Progress, Ticket, Worker


class RemoteScheduler:
    """Implements `RequestScheduler` by a worker, which it closes. Not for several threads."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = count()
        self._news: SimpleQueue[tuple[int, News]] = SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._over: dict[int, Answer | Failure] = {}

    def add(self, request: Request) -> int:
        """See `RequestScheduler`."""
        return self.add_together([request])[0]

    def add_together(self, requests: Sequence[Request]) -> list[int]:
        """See `RequestScheduler`. What their prompts share is up to the servers' prefix caches."""
        for request in requests:
            self._worker.check(request)
        return [self._begin(request) for request in requests]

    def step(self) -> None:
        """Wait until an answer is over that was not; at once if none is under way."""
        while self._tickets:
            number, news = self._news.get()
            if number in self._tickets and not isinstance(news, Progress):
                del self._tickets[number]
                self._over[number] = news
                return

    def result(self, number: int) -> Answer | None:
        """See `RequestScheduler`. Raises RemoteError if the servers failed."""
        found = self._over.get(number)
        if isinstance(found, Failure):
            raise found.error
        return found

    def forget(self, number: int) -> None:
        """See `RequestScheduler`."""
        if ticket := self._tickets.pop(number, None):
            ticket.cancel()
        self._over.pop(number, None)

    def close(self) -> None:
        """Cancel everything and end all connections; it is of no use afterwards."""
        self._worker.close()

    def _begin(self, request: Request) -> int:
        number = next(self._numbers)
        self._tickets[number] = self._worker.submit(
            request, lambda news: self._news.put((number, news))
        )
        return number
