"""Decoding tasks: procedures that need answers, run together over one scheduler.

A task is a generator. It gets answers by `yield from ask(...)`, yields before each step of the
scheduler, and returns its result. The same code runs one task alone or many together.
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
"""What a failed forward pass raises: RuntimeError is that of torch and llama.cpp."""


def run_all(
    scheduler: Any, tasks: Iterable[DecodingTask[TaskResult]], max_concurrency: int = 1
) -> Iterator[TaskResult]:
    """Run all tasks, at most `max_concurrency` at a time; yield each result as it comes.

    An exception of one task ends all of them, and so does closing this iterator.
    """
    waiting = iter(tasks)
    running: list[DecodingTask[TaskResult]] = []
    try:
        while True:
            running += islice(waiting, max_concurrency - len(running))
            if not running:
                return
            for task in list(running):
                try:
                    next(task)
                except StopIteration as finished:
                    running.remove(task)
                    yield finished.value
            with suppress(*FAILURES):  # `next` raises it in the tasks whose requests it ended
                scheduler.step()
    finally:
        for task in running:
            task.close()


def ask(
    scheduler: Any,
    requests: Sequence[Request],
    *,
    max_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> DecodingTask[list[Answer]]:
    """Return the answers to `requests`, in order. Closing the task cancels them.

    Raises the error of a request that fails, and PastaError if no token of these requests is
    computed for `max_seconds`.
    """
    generations: list[Any] = []
    try:
        for request in requests:
            # One by one, so that `finally` cancels those before a request that is refused.
            generations.append(scheduler.add(request))  # noqa: PERF401
        last_counts = [0]
        last_progress_s = clock()
        while unfinished := [
            generation for generation in generations if generation.result() is None
        ]:
            counts = [generation.computed for generation in unfinished]
            is_queued = not any(counts)
            if is_queued or counts != last_counts:
                last_counts = counts
                last_progress_s = clock()
            elif clock() - last_progress_s > max_seconds:
                raise PastaError(f"nothing was computed for {max_seconds:g} s")
            yield
        return [generation.result() for generation in generations]
    finally:
        for generation in generations:
            scheduler.cancel(generation)
