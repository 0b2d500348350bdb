"""Policies for tests: without reason, the fewest steps, and the narrowest ones."""

from collections.abc import Sequence
from random import Random

from pasta_decoding.scheduling.policy import RunnableThreads, SchedulingPolicy

MOST_IDLE = 5


class Whim(SchedulingPolicy):
    """Chooses by chance; after so many idle steps the first thread of each answer advances."""

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
        return chosen if self._idle < MOST_IDLE else [answer.threads[:1] for answer in answers]


class EveryThread(SchedulingPolicy):
    """Everybody advances: the fewest steps an answer."""

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        return [answer.threads for answer in answers]


class ReadingOrder(EveryThread):
    """One thread an answer: the order in which a reader wants it, and the narrowest steps."""

    def choose(self, answers: Sequence[RunnableThreads]) -> list[Sequence[int]]:
        return [answer.threads[:1] for answer in answers]
