"""Policies for tests: random threads, every thread, and one thread an answer."""

from collections.abc import Sequence
from random import Random

from pasta_decoding.scheduling.policy import RunnableThreads, SchedulingPolicy

MAX_IDLE_STEPS = 5


class Whim(SchedulingPolicy):
    """Chooses random threads; after `MAX_IDLE_STEPS` idle steps, each answer's first thread."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = Random(seed)
        self._idle = 0

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        eager = self._chance.random()
        chosen: list[Sequence[int]] = [
            [thread for thread in answer.threads if self._chance.random() < eager]
            for answer in answers
        ]
        self._idle = 0 if any(chosen) else self._idle + 1
        return chosen if self._idle < MAX_IDLE_STEPS else [answer.threads[:1] for answer in answers]


class EveryThread(SchedulingPolicy):
    """Chooses every thread: an answer takes the fewest steps."""

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        return [answer.threads for answer in answers]


class ReadingOrder(EveryThread):
    """Chooses each answer's first thread: it writes in reading order, in the narrowest steps."""

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        return [answer.threads[:1] for answer in answers]
