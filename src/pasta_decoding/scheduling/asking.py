"""Many questions over one scheduler: what they ask for is decoded together.

A question under way is a generator. It gets answers by `yield from ask(...)`, pauses there before
each step, and returns its result. The same lines run alone and beside others.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.errors import PastaError

TaskResult = TypeVar("TaskResult")
DecodingTask = Generator[None, None, TaskResult]

FAILURES = (PastaError, RuntimeError)
"""What an engine raises if it cannot: torch and llama.cpp report a failed pass as the second."""


def run_all(
    scheduler: Any, askings: Iterable[DecodingTask[TaskResult]], max_concurrency: int = 1
) -> Iterator[TaskResult]:
    """Run all, several of them together; yield each result as it comes.

    What one raises ends all of them, and so does leaving early.
    """
    waiting, running = iter(askings), list[DecodingTask[TaskResult]]()
    try:
        while True:
            running += islice(waiting, max_concurrency - len(running))
            if not running:
                return
            for one in list(running):
                try:
                    next(one)
                except StopIteration as over:
                    running.remove(one)
                    yield over.value
            with suppress(*FAILURES):  # the questions that it ended find out above
                scheduler.step()
    finally:
        for one in running:
            one.close()


def ask(
    scheduler: Any,
    requests: Sequence[Request],
    *,
    max_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> DecodingTask[list[Answer]]:
    """Return the answers to requests, in order; leaving early cancels them.

    Raises what a request fails with, and PastaError if nothing is computed for `max_seconds`.
    """
    asked: list[Any] = []
    try:
        asked += map(scheduler.add, requests)
        before, last_s = [0], clock()
        while missing := [one for one in asked if one.result() is None]:
            computed = [one.computed for one in missing]
            if computed != before or not any(computed):
                before, last_s = computed, clock()
            elif clock() - last_s > max_seconds:
                raise PastaError(f"nothing was computed for {max_seconds:g} s")
            yield
        return [one.result() for one in asked]
    finally:
        for one in asked:
            scheduler.cancel(one)
