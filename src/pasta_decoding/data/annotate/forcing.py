"""Forced text on an engine: threads that are told what they write, and asked what it costs.

Who annotates by decoding is a generator: it asks for tokens to be fed and is sent the logits behind
each of them. Many run side by side; what they ask for goes into one step of the engine.

Shapes: F tokens fed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray

Result = TypeVar("Result")
Work = Generator[list[Feed], FloatArray, Result]


@dataclass(slots=True)
class Room:
    """How many more tokens an answer may be fed, all its strands together."""

    tokens: int


@dataclass(slots=True)
class Strand:
    """One thread of an answer on an engine.

    position:   of its next token.
    logprobs_V: of what comes next; None before the first token.
    """

    engine: Engine
    branch: Branch
    room: Room
    position: int = 0
    logprobs_V: FloatArray | None = None

    @classmethod
    def open(cls, engine: Engine, room: int) -> Strand:
        """Return the first strand of a new answer."""
        return cls(engine, engine.open(room=room), Room(room))

    def fork(self) -> Strand:
        """Return a strand that goes on from here by itself."""
        branch = self.engine.fork(self.branch)
        return Strand(self.engine, branch, self.room, self.position, self.logprobs_V)

    def join(self, others: Sequence[Strand]) -> None:
        """See from now on what the others see; they are closed."""
        self.engine.join(self.branch, [other.branch for other in others])

    def close(self) -> None:
        """Release the branch."""
        self.engine.close(self.branch)

    def logprob(self, token: int) -> float:
        """Return the log-probability of `token` coming next (nats)."""
        assert self.logprobs_V is not None, "a prompt was fed"
        return float(self.logprobs_V[token])

    def tell(self, ids: Sequence[int]) -> Work[None]:
        """Append `ids`, whatever they cost."""
        positions = tuple(range(self.position, self.position + len(ids)))
        logits_FV = yield [Feed((self.branch,), tuple(ids), positions)]
        self._advance(len(ids))
        self.logprobs_V = log_softmax(logits_FV[-1])

    def feed(self, ids: Sequence[int]) -> Work[list[float]]:
        """Append `ids`; return the log-probability that each had (nats)."""
        if not ids:
            return []
        places = enumerate(ids, start=self.position)
        logits_FV = yield [Feed((self.branch,), (token,), (place,)) for place, token in places]
        found = [self.logprob(ids[0])]
        for row_V, token in zip(logits_FV, [*ids[1:], None], strict=True):
            self.logprobs_V = log_softmax(row_V)
            found += [] if token is None else [self.logprob(token)]
        self._advance(len(ids))
        return found

    def _advance(self, tokens: int) -> None:
        self.position += tokens
        self.room.tokens -= tokens


def log_softmax(logits_V: FloatArray) -> FloatArray:
    """Return log-probabilities (nats)."""
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def side_by_side(works: Sequence[Work[Result]], engine: Engine) -> list[tuple[Result, int]]:
    """Run all works to their ends; each step feeds what all of them ask for.

    Returns each one's result, and how many tokens were fed for it.
    """
    results: dict[int, Result] = {}
    asked: dict[int, list[Feed]] = {}
    fed = [0] * len(works)

    def go_on(number: int, logits_FV: FloatArray | None) -> None:
        try:
            work = works[number]
            asked[number] = next(work) if logits_FV is None else work.send(logits_FV)
        except StopIteration as stop:
            asked.pop(number, None)
            results[number] = stop.value

    for number in range(len(works)):
        go_on(number, None)
    while asked:
        logits_FV = engine.step([feed for feeds in asked.values() for feed in feeds])
        first = 0
        for number, feeds in list(asked.items()):
            fed[number] += sum(len(feed.ids) for feed in feeds)
            go_on(number, logits_FV[first : first + len(feeds)])
            first += len(feeds)
    return [(results[number], fed[number]) for number in range(len(works))]
