"""Which threads of the answers over one service have a request open, and which wait.

There are no steps here: a server schedules the requests that it has. So threads are delayed by
asking later. An answer alone asks for all its threads. Of several each has a request open, that of
its first unfinished text, and as many more as make a token cheapest, by how long requests have been
seen to take for a token with that many open. A server with Pasta's logits processor is asked for
all threads at once: no request is cut in two there, and it obeys priorities.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.policy import CheapestStep


@dataclass(slots=True)
class _Line:
    """One answer's threads: those that have their turn, and those that wait for one."""

    open: set[int] = field(default_factory=set)
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    def admit_first(self) -> None:
        """Give the first that waits, in reading order, its turn: chunks as promised, then main."""
        thread = min(self.waiting, key=lambda one: (one == MAIN, one))
        self.open.add(thread)
        turn = self.waiting.pop(thread)
        if not turn.done():
            turn.set_result(None)


class ConcurrencyLimiter:
    """Lets threads open requests. Everything belongs to one event loop; an answer is any object."""

    def __init__(self, policy: CheapestStep | None = None) -> None:
        self._policy = CheapestStep() if policy is None else policy
        self._lines: dict[object, _Line] = {}

    @property
    def open_requests(self) -> int:
        """How many threads have their turn."""
        return sum(len(line.open) for line in self._lines.values())

    @property
    def waiting(self) -> int:
        """How many wait for it."""
        return sum(len(line.waiting) for line in self._lines.values())

    def admits(self, answer: object, thread: int) -> bool:
        """Has `thread` its turn? It may lose it: main does, where a chunk needs it."""
        return answer in self._lines and thread in self._lines[answer].open

    def has_others(self, answer: object) -> bool:
        """Do other answers than this one have threads that write, or wait for it?"""
        return bool(self._lines.keys() - {answer})

    def take(self, answer: object, thread: int) -> None:
        """Give `thread` its turn, however many are open."""
        self._lines.setdefault(answer, _Line()).open.add(thread)

    async def enter(self, answer: object, thread: int, *, main_yields: bool = True) -> None:
        """Wait for the turn of `thread`.

        main_yields: main gives its own up to a chunk that would have to wait for it, since what it
            writes stands behind the chunk. It needs another request then, so it can only where
            that writes the same.
        """
        line = self._lines.setdefault(answer, _Line())
        turn = line.waiting[thread] = asyncio.get_running_loop().create_future()
        self._admit()
        if thread in line.waiting and main_yields and line.open == {MAIN}:
            line.open.clear()
            self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            self.leave(answer, thread)
            raise

    def leave(self, answer: object, thread: int) -> None:
        """Give a turn up, or the wish for one; others may have it."""
        line = self._lines.get(answer)
        if line is None:
            return
        line.open.discard(thread)
        line.waiting.pop(thread, None)
        if not line.open and not line.waiting:
            del self._lines[answer]
        self._admit()

    def note(self, token_s: float) -> None:
        """Hear what a token of a request took while so many are open."""
        if self.open_requests:
            self._policy.learn(self.open_requests, token_s)

    def _admit(self) -> None:
        lines = list(self._lines.values())
        for line in lines:
            if line.waiting and not line.open:
                line.admit_first()
        wide = self.open_requests + self.waiting
        room = self._policy.width(len(lines), wide, alone=len(lines) == 1) if lines else 0
        for _ in range(room - self.open_requests):
            asking = [line for line in lines if line.waiting]
            min(asking, key=lambda line: len(line.open)).admit_first()
