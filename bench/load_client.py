"""Clients of a server of chat completions: many at once, streaming, and what they went through.

Closed loop: so many clients, each of whom asks again as soon as it has its answer. Open loop:
answers are asked for at a rate, whether the server keeps up or not.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

PAUSE_S = 0.5
"""After an error: a server that refuses at once would else be asked as fast as it can refuse."""


@dataclass(eq=False, slots=True)
class Visit:
    """One answer as its client saw it; times are of `time.perf_counter`.

    pieces: when text came, and how many characters of it.
    error:  what went wrong, in a word; such a visit counts as an error and nowhere else.
    share:  of `max_tokens` that was asked for.
    """

    began_s: float
    share: float = 1.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float | None = None
    error: str | None = None
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def characters(self) -> int:
        """Characters of the answer."""
        return sum(characters for _, characters in self.pieces)

    @property
    def plain_tokens(self) -> int:
        """Tokens of the answer's text; of a server that does not tell, all tokens."""
        found: int = self.usage.get("plain_tokens", self.usage.get("completion_tokens", 0))
        return found

    @property
    def fed_tokens(self) -> int:
        """Tokens of the answer with its tags, and those that were written in vain."""
        fed: int = self.usage.get("completion_tokens", 0) + self.usage.get("trimmed_tokens", 0)
        return fed

    @property
    def seconds(self) -> float | None:
        """From asking to the end; None if it has not come."""
        return None if self.ended_s is None else self.ended_s - self.began_s

    @property
    def sequential(self) -> bool:
        """Did it have a single thread?"""
        return self.usage.get("threads", 1) == 1


@dataclass(frozen=True, slots=True)
class Site:
    """Where to ask, and how: `body` is all of a request but its messages.

    parallel_up_to: answers under way beyond which one that begins has its promises banned.
    """

    client: httpx2.AsyncClient
    url: str
    body: dict[str, Any]
    timeout_s: float
    parallel_up_to: int | None = None

    async def visit(self, question: str, visit: Visit, under_way: int) -> None:
        """Ask, and write down what comes. Only a cancellation is raised."""
        messages: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        if self.parallel_up_to is not None and under_way > self.parallel_up_to:
            messages["pasta_parallel"] = False
        limit = {"max_tokens": max(1, round(visit.share * self.body["max_tokens"]))}
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read({**messages, **self.body, **limit}, visit)
        except TimeoutError:
            visit.error = "timed out"
        except httpx2.HTTPError as error:
            visit.error = type(error).__name__
        visit.ended_s = time.perf_counter()

    async def _read(self, body: dict[str, Any], visit: Visit) -> None:
        async with self.client.stream("POST", self.url, json=body) as reply:
            if reply.status_code != 200:
                visit.error = str(reply.status_code)
                return
            async for event in _events(reply.aiter_lines()):
                _note(event, visit)
        if visit.error is None and visit.finish is None:
            visit.error = "broke off"


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "data" and value != "[DONE]":
            yield json.loads(value)


def _note(event: dict[str, Any], visit: Visit) -> None:
    if "error" in event:
        visit.error = str(event["error"].get("code") or event["error"].get("type"))
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            visit.pieces.append((time.perf_counter(), len(text)))
        visit.finish = choice["finish_reason"] or visit.finish
    visit.usage = event.get("usage") or visit.usage


@dataclass(eq=False)
class Crowd:
    """Everybody who asks one site, one question after the other from `questions`, over and over.

    settled: how many clients of a closed loop have had an answer of full length.
    """

    site: Site
    questions: Sequence[str]
    visits: list[Visit] = field(default_factory=list)
    turned_away: int = 0
    settled: int = 0

    async def closed(self, clients: int) -> None:
        """Keep so many clients busy until cancelled.

        Their first answers are cut short, each at another length. Where answers end at the limit,
        clients that began together would else stay in step, and their prompts be read together.
        """
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask_for_ever((number + 1) / clients))

    async def open(self, rate: float, most: int, chance: random.Random) -> None:
        """Begin `rate` answers a second on average, at random, until cancelled.

        Whoever would be one more than `most` under way is turned away, and counted.
        """
        due_s = time.perf_counter()
        under_way: set[asyncio.Task[Visit]] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                due_s += chance.expovariate(rate)
                await asyncio.sleep(due_s - time.perf_counter())
                if len(under_way) >= most:
                    self.turned_away += 1
                    continue
                task = group.create_task(self._ask())
                under_way.add(task)
                task.add_done_callback(under_way.discard)

    async def _ask_for_ever(self, first_share: float) -> None:
        share, settled = first_share, False
        while True:
            visit = await self._ask(share)
            if visit.error is not None:
                await asyncio.sleep(PAUSE_S)
            elif share == 1 and not settled:
                settled = True
                self.settled += 1
            share = 1.0

    async def _ask(self, share: float = 1.0) -> Visit:
        question = self.questions[len(self.visits) % len(self.questions)]
        visit = Visit(time.perf_counter(), share)
        self.visits.append(visit)
        under_way = sum(one.ended_s is None for one in self.visits)
        await self.site.visit(question, visit, under_way)
        return visit


@dataclass(frozen=True, slots=True)
class Window:
    """What a crowd went through between two moments, when it had found its pace.

    warm:  whether the crowd had found its pace when it began.
    cpu_s: processor seconds that the server had; None if that is not known.
    """

    visits: Sequence[Visit]
    turned_away: int
    warm: bool
    began_s: float
    ended_s: float
    cpu_s: float | None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended_s - self.began_s

    @property
    def answers(self) -> list[Visit]:
        """Answers of full length that ended in it, whenever they began."""
        return [visit for visit in self._over() if visit.error is None and visit.share == 1]

    @property
    def errors(self) -> list[str]:
        """What went wrong in it."""
        return [visit.error for visit in self._over() if visit.error is not None]

    @property
    def first_text_s(self) -> list[float]:
        """Seconds to the first text, where that came in the window."""
        firsts = [(visit.pieces[0][0], visit.began_s) for visit in self.visits if visit.pieces]
        return [came_s - began_s for came_s, began_s in firsts if self._holds(came_s)]

    @property
    def characters(self) -> int:
        """Characters that came in it, of whole answers and of others."""
        pieces = [piece for visit in self.visits for piece in visit.pieces]
        return sum(characters for came_s, characters in pieces if self._holds(came_s))

    def _over(self) -> list[Visit]:
        return [v for v in self.visits if v.ended_s is not None and self._holds(v.ended_s)]

    def _holds(self, moment_s: float) -> bool:
        return self.began_s <= moment_s < self.ended_s


async def watch(
    crowd: Crowd,
    behave: Awaitable[None],
    seconds: float,
    is_warm: Callable[[], bool],
    most_s: float,
    cpu_s: Callable[[], float | None],
) -> Window:
    """Let a crowd behave, and look at it for `seconds` once it is warm, or after `most_s`.

    Who is still there in the end leaves; the server frees what was written for them.
    """
    task = asyncio.ensure_future(behave)
    try:
        await _until(lambda: is_warm() or task.done(), most_s)
        warm = is_warm()
        began_s, began_cpu_s, away = time.perf_counter(), cpu_s(), crowd.turned_away
        await asyncio.wait([task], timeout=seconds)
        ended_s, ended_cpu_s = time.perf_counter(), cpu_s()
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()  # it never ends by itself: what broke it is raised here
    used_s = None if began_cpu_s is None or ended_cpu_s is None else ended_cpu_s - began_cpu_s
    away = crowd.turned_away - away
    return Window(list(crowd.visits), away, warm, began_s, ended_s, used_s)


async def _until(holds: Callable[[], bool], most_s: float) -> None:
    end_s = time.perf_counter() + most_s
    while not holds() and time.perf_counter() < end_s:
        await asyncio.sleep(0.05)
