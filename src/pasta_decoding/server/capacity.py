"""How many answers are taken in at a time, and what the others are told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.answer import Answer

FIRST_GUESS_S = 5.0
"""What an answer is taken to last before one has been seen."""
MAX_RETRY_S = 60


class BusyError(Exception):
    """There is no room for a request, not even to wait. `retry_after_s`: when to try again."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"busy for {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Capacity:
    """Decides who may come in. All of it belongs to the event loop's thread.

    max_concurrency: answers that are written together,
    queue:           and how many more may wait.
    unended:         those that were taken in and have not ended.
    """

    max_concurrency: int
    queue: int
    unended: int = 0
    _typical_s: float = FIRST_GUESS_S

    @property
    def running(self) -> int:
        """How many answers are being written."""
        return min(self.unended, self.max_concurrency)

    @property
    def waiting(self) -> int:
        """How many answers wait."""
        return self.unended - self.running

    def check_room(self, answers: int) -> None:
        """Raise BusyError if there is no room for all answers of a request.

        PastaError if there never will be.
        """
        most = self.max_concurrency + self.queue
        if answers > most:
            raise PastaError(
                f"these are {answers} answers, and this server takes {most} at a time",
                hint="Ask for fewer choices or prompts.",
                field="n",
            )
        if self.unended + answers > most:
            raise BusyError(self._retry_after_s())

    def enter(self, answers: int) -> None:
        """Take a request's answers in; errors as above."""
        self.check_room(answers)
        self.unended += answers

    def leave(self) -> None:
        """Give up the place of an answer, whatever became of it."""
        self.unended -= 1

    def note(self, answer: Answer) -> None:
        """Learn what answers last, once they are let in."""
        self._typical_s += 0.2 * (answer.seconds - answer.queue_s - self._typical_s)

    def _retry_after_s(self) -> int:
        """Guess when the first of the queue will have been let in."""
        turns = self.unended / self.max_concurrency
        return min(MAX_RETRY_S, max(1, math.ceil(self._typical_s * turns)))
