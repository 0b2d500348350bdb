"""Which threads of one answer could write next, in reading order, and what the others wait for.

What would need more cells or threads than the answer was given waits. What will probably turn out
to stand beyond the answer's budget is told apart: whoever has something better to do lets it wait.
The first unfinished text never waits, so in the end everything has its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.interpreter import Interpreter

MOST_A_CHOICE = 2
"""Tokens that one choice adds at most: PROMISE_CLOSE, and ASYNC_OPEN with it."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one answer was given beyond the least that it can be written with.

    ahead_tokens: tokens that may be written beyond its budget, to be trimmed.
    threads:      threads that may have begun and not ended, main included; at least two.
    """

    ahead_tokens: int
    threads: int


NO_MORE = Allotment(ahead_tokens=0, threads=2)
"""Main, and the chunk that it waits for: an answer of any width can be written with them."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Who can write next, and how many cannot.

    ready:  in reading order.
    likely: how many of them, the first ones, will probably not be trimmed.
    for_room, for_thread: how many wait since there is no room to write so far ahead, or since no
            more threads may begin.
    """

    ready: Sequence[int]
    likely: int
    for_room: int = 0
    for_thread: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """Threads that have a token to be fed. `opening`: the chunk that main's opens; else None."""

    threads: Collection[int]
    opening: int | None = None

    def in_reading_order(self) -> list[int]:
        """Return the threads. Main comes last, but what opens a chunk comes before the chunk."""
        order = sorted(thread for thread in self.threads if thread != MAIN)
        if MAIN in self.threads:
            order.insert(len(order) if self.opening is None else order.index(self.opening), MAIN)
        return order


def turns_of(interpreter: Interpreter, pending: Pending, allotment: Allotment, begun: int) -> Turns:
    """Tell who can write next. `begun`: threads that have begun and not ended."""
    order = pending.in_reading_order()
    if len(order) < 2:
        return Turns(order, len(order))
    served = _with_a_thread(order, interpreter, begun < allotment.threads)
    safe = _with_room(served, interpreter, allotment.ahead_tokens)
    ready = safe[: interpreter.rules.max_threads]
    likely = _likely(ready, interpreter, pending.opening)
    for_room = len(served) - len(safe)
    return Turns(ready, likely, for_room, len(order) - len(ready) - for_room)


def _with_a_thread(order: list[int], interpreter: Interpreter, another: bool) -> list[int]:
    """Leave main out where its next token may begin a thread too many."""
    if another or not interpreter.in_topic(MAIN):
        return order
    return [thread for thread in order if thread != MAIN]


def _with_room(order: list[int], interpreter: Interpreter, ahead_tokens: int) -> list[int]:
    """Return the first, and of the others as many as have room to write ahead of it."""
    first, rest = order[0], order[1:]
    if not rest or _is_safe(interpreter, ahead_tokens, main=MAIN in rest):
        return order
    spare = ahead_tokens - (interpreter.budget.written_tokens - interpreter.budget.place(first))
    return order[: 1 + max(0, spare // MOST_A_CHOICE)]


def _likely(order: Sequence[int], interpreter: Interpreter, opening: int | None) -> int:
    """Count the first, and those that stand within the budget if chunks are as long as promised."""
    budget = interpreter.rules.max_tokens
    if interpreter.budget.expected_place() < budget:
        return len(order)
    places = [(opening if thread == MAIN and opening else thread) for thread in order[1:]]
    return 1 + sum(interpreter.budget.expected_place(thread) < budget for thread in places)


def _is_safe(interpreter: Interpreter, ahead_tokens: int, *, main: bool) -> bool:
    """Is there room for all that has begun to come to its own limits?"""
    budget = interpreter.budget
    coming = budget.most_to_come()
    if main:
        coming += MOST_A_CHOICE
        longest = max(interpreter.vocabulary.control.promise_close)
        coming += budget.most_of_a_chunk(longest) if interpreter.in_topic(MAIN) else 0
    return budget.written_tokens + coming <= interpreter.rules.max_tokens + ahead_tokens
