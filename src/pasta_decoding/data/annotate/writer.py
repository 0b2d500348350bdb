"""A checkpoint writes a given response again, and tags of its own into it; see model.py.

Wherever a tag may stand, the text before it has ids of its own: training encodes the text between
tags piece by piece. So a strand is fed only those ids that text with and without a tag begin with
alike, and each of the two goes on from there by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from pasta_decoding.data.annotate.candidates import find_candidates, find_units
from pasta_decoding.data.annotate.forcing import Strand, Work
from pasta_decoding.data.dataset import Row
from pasta_decoding.engines.base import Engine
from pasta_decoding.lang.positions import Extent, Scheme
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, valid_tokens, valid_topic
from pasta_decoding.models.binding import Binding

LENGTHS = 8  # of the plain response, that there is room for in the cache,
SPARE_TOKENS = 200  # and what short ones need besides
MAX_READINGS = 3  # of a chunk, until the promised length is the real one
MAX_TOPIC_TOKENS = 8
TOPIC_CHOICES = 64  # of the likeliest tokens, among which a topic's next one is looked for
MIN_PROMISE_NATS = -8.0  # less likely than this, a promise is not tried


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a tag is written; see model.py. Set on rows that nothing is measured on."""

    promise_nats: float = 0.0
    close: float = 0.5
    sync: float = 0.5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trained checkpoint on an engine, and its tokenizer.

    encode:        the ids of a text; never a special token.
    encode_prompt: the ids of an instruction, ready for the answer.
    decode:        the text of ids.
    """

    engine: Engine
    binding: Binding
    scheme: Scheme
    encode: Callable[[str], Sequence[int]]
    encode_prompt: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Promised:
    """A chunk that may be: its topic and its ids, its length bucket, and its last unit.

    opening_nats: log-probability of its first unit's tokens.
    close_nats:   that of ASYNC_CLOSE behind its last one.
    """

    topic: str
    ids: tuple[int, ...]
    bucket: int
    last: int
    opening_nats: float
    close_nats: float


class Writer:
    """One response being written; `write` is what an engine runs.

    ids:       of the plain response.
    room:      tokens that may be fed, prompt included.
    decisions: the tags written, each with the log-probability that it had.
    """

    def __init__(self, checkpoint: Checkpoint, thresholds: Thresholds, row: Row) -> None:
        self.row, self.ids = row, checkpoint.encode(row.response)
        self.decisions: list[tuple[int, float]] = []
        self._checkpoint, self._binding = checkpoint, checkpoint.binding
        self._buckets = checkpoint.binding.promise_close
        self._closes = list(self._buckets.values())
        self._thresholds, self._text = thresholds, row.response
        self._prompt = checkpoint.encode_prompt(row.instruction)
        self.room = len(self._prompt) + LENGTHS * len(self.ids) + SPARE_TOKENS
        self._units = find_units(self._text)
        self._ends: dict[int, list[int]] = {}
        for one in find_candidates(self._units):
            self._ends.setdefault(one.first, []).append(one.last)
        self._nodes: list[Node] = []
        self._topics: list[list[str]] = []
        self._unjoined: list[tuple[Strand, int, tuple[int, ...]]] = []
        self._begin(0)

    def write(self) -> Work[Tree]:
        """Write the whole response; return it with its tags."""
        self._main = Strand.open(self._checkpoint.engine, self.room)
        yield from self._main.tell(self._prompt)
        number = 0
        while number < len(self._units):
            yield from self._reach(number)
            if (yield from self._wants_sync()):
                yield from self._sync(number)
            promised = yield from self._try_chunk(number)
            if promised:
                yield from self._keep(number, promised)
            number = promised.last + 1 if promised else number + 1
        for strand in [self._main, *(one for one, _, _ in self._unjoined)]:
            strand.close()
        self._end_span(len(self._text))
        return tuple(self._nodes)

    # The main thread. It was fed the first `_fed` ids of `_plain`, which are those of the text from
    # `_at` on. In front of the unit reached, text before a tag ends with the ids `_tail` instead;
    # None where it would begin with others than were fed.

    def _begin(self, at: int) -> None:
        self._at, self._fed = at, 0
        self._plain = self._checkpoint.encode(self._text[at:])
        self._tail: list[int] | None = []

    def _reach(self, number: int) -> Work[None]:
        before = self._checkpoint.encode(self._text[self._at : self._units[number].start])
        same = _alike(before, self._plain)
        self._tail = list(before[same:]) if same >= self._fed else None
        if same > self._fed:
            yield from self._main.tell(self._plain[self._fed : same])
            self._fed = same

    def _end_span(self, end: int) -> None:
        if end > self._at:
            self._nodes.append(Span(self._text[self._at : end]))

    def _wants_sync(self) -> Work[bool]:
        if not self._unjoined or self._tail is None:
            return False
        probe = self._main.fork()
        yield from probe.feed(self._tail)
        wanted = probe.logprob(self._binding.sync) >= math.log(self._thresholds.sync)
        probe.close()
        return wanted

    def _sync(self, number: int) -> Work[None]:
        """Feed the chunks that are promised, join them, and wait."""
        scheme = self._checkpoint.scheme
        assert self._tail is not None, "asked before"
        yield from self._main.feed(self._tail)
        self._decide(self._main, self._binding.sync)
        extents = []
        for strand, bucket, ids in self._unjoined:
            first = strand.position
            yield from strand.tell(ids)
            extents.append(Extent(first, strand.position - 1, bucket))
        self._main.join([strand for strand, _, _ in self._unjoined])
        self._unjoined.clear()
        self._main.position = scheme.sync(self._main.position, extents)
        yield from self._main.tell([self._binding.sync])
        self._end_span(self._units[number].start)
        self._nodes.append(Sync())
        self._begin(self._units[number].start)

    def _decide(self, strand: Strand, token: int) -> None:
        self.decisions.append((token, strand.logprob(token)))

    # Chunks

    def _try_chunk(self, number: int) -> Work[Promised | None]:
        """Return a chunk that begins with this unit, if that explains the unit better.

        Otherwise the unit has been written as main text.
        """
        if number not in self._ends or self._tail is None or self._short_of_room(number):
            return None
        probe = self._main.fork()
        nats = sum((yield from probe.feed([*self._tail, self._binding.promise_open])))
        promised = None
        if nats >= MIN_PROMISE_NATS and (topic := (yield from self._topic(probe.fork()))):
            promised = yield from self._read(probe, topic, number)
        probe.close()
        if promised is None:
            return None
        ahead, ids = self._main.fork(), self._plain[self._fed : self._place(number)]
        gain = nats + promised.opening_nats - sum((yield from ahead.feed(ids)))
        if gain > self._thresholds.promise_nats:
            ahead.close()
            return promised
        self._main.close()
        self._main, self._fed = ahead, self._fed + len(ids)
        return None

    def _short_of_room(self, number: int) -> bool:
        """Tell whether a chunk from here on may not be read as often as it might have to be."""
        longest = self._ids(number, self._ends[number][-1])
        needed = len(self.ids) + MAX_READINGS * len(longest) + SPARE_TOKENS // 2
        return self._main.room.tokens < needed

    def _ids(self, first: int, last: int) -> tuple[int, ...]:
        """Return the ids of a chunk of these units."""
        text = self._text[self._units[first].start : self._units[last].end]
        return tuple(self._checkpoint.encode(text))

    def _place(self, number: int) -> int:
        """Return how many ids of `_plain` there are up to the end of a unit."""
        text = self._text[self._at : self._units[number].end]
        return max(self._fed, _alike(self._checkpoint.encode(text), self._plain))

    def _topic(self, strand: Strand) -> Work[str | None]:
        """Return the topic that the checkpoint would give, unlike all others; None if it cannot."""
        ids: list[int] = []
        while (token := self._next_in_topic(strand, ids)) is not None and token not in self._closes:
            ids.append(token)
            yield from strand.tell([token])
        strand.close()
        return valid_topic(self._checkpoint.decode(ids)) if token is not None else None

    def _next_in_topic(self, strand: Strand, ids: list[int]) -> int | None:
        """Return the likeliest token that may go on a topic or, if it is new, end it."""
        assert strand.logprobs_V is not None, "PROMISE_OPEN was fed"
        topic = self._checkpoint.decode(ids)
        new = valid_topic(topic) is not None and topic.casefold().split() not in self._topics
        for token in np.argsort(-strand.logprobs_V)[:TOPIC_CHOICES].tolist():
            if token in self._closes:
                if new:
                    return token
            elif len(ids) < MAX_TOPIC_TOKENS and self._goes_on(topic, [*ids, token]):
                return token
        return self._closes[0] if new else None

    def _goes_on(self, topic: str, ids: list[int]) -> bool:
        longer = self._checkpoint.decode(ids)
        plain = " ".join(longer.split())
        return longer != topic and "\n" not in longer and valid_topic(longer) == plain

    def _read(self, probe: Strand, topic: str, number: int) -> Work[Promised]:
        """Read the chunk until the promised length is the real one."""
        ids = tuple(self._checkpoint.encode(topic))
        strand = probe.fork()
        yield from strand.tell(ids)
        bucket = max(self._buckets, key=lambda size: strand.logprob(self._buckets[size]))
        ends = self._ends[number]
        for reading in range(1, MAX_READINGS + 1):
            if reading == MAX_READINGS:
                ends = [last for last in ends if self._bucket(number, last) == bucket]
            first, last, close = yield from self._read_chunk(strand, bucket, number, ends)
            if (real := self._bucket(number, last)) == bucket:
                break
            bucket = real
        strand.close()
        return Promised(topic, ids, bucket, last, first, close)

    def _bucket(self, first: int, last: int) -> int:
        return self._binding.bucket(valid_tokens(len(self._ids(first, last))))

    def _read_chunk(
        self, promise: Strand, bucket: int, number: int, ends: Sequence[int]
    ) -> Work[tuple[float, int, float]]:
        """Read a chunk up to where it closes.

        Returns the log-probability of its first unit, its last unit, and that of ASYNC_CLOSE there.
        """
        chunk = yield from self._open_chunk(promise, bucket)
        text = self._text[self._units[number].start :]
        plain, fed, first = self._checkpoint.encode(text), 0, 0.0
        closing: list[tuple[float, int]] = []
        for last in sorted({number, *ends}):
            ids = self._ids(number, last)
            same = max(fed, _alike(ids, plain))
            nats = yield from chunk.feed(plain[fed:same])
            first, fed = (sum(nats) if last == number else first), same
            if last not in ends:
                continue
            end = chunk.fork()
            yield from end.feed(ids[same:])
            closing.append((end.logprob(self._binding.async_close), last))
            end.close()
            if closing[-1][0] >= math.log(self._thresholds.close):
                break
        chunk.close()
        close, last = max(closing, key=lambda one: one[0])
        return first, last, close

    def _open_chunk(self, promise: Strand, bucket: int) -> Work[Strand]:
        """Return a strand that was fed PROMISE_CLOSE and ASYNC_OPEN."""
        chunk = promise.fork()
        yield from chunk.tell([self._buckets[bucket]])
        chunk.position = self._checkpoint.scheme.chunk_start(chunk.position - 1, bucket)
        yield from chunk.tell([self._binding.async_open])
        return chunk

    def _keep(self, number: int, promised: Promised) -> Work[None]:
        """Write the promise; its chunk is fed when a sync waits for it."""
        scheme, binding, bucket = self._checkpoint.scheme, self._binding, promised.bucket
        assert self._tail is not None, "asked before"
        nats = yield from self._main.feed([*self._tail, binding.promise_open, *promised.ids])
        self.decisions.append((binding.promise_open, nats[len(self._tail)]))
        self._decide(self._main, self._buckets[bucket])
        yield from self._main.tell([self._buckets[bucket]])
        close, chunk = self._main.position - 1, self._main.fork()
        chunk.position = scheme.chunk_start(close, bucket)
        self._main.position = scheme.main_next(close, bucket)
        ids = self._ids(number, promised.last)
        self._unjoined.append((chunk, bucket, (binding.async_open, *ids)))
        self.decisions.append((binding.async_close, promised.close_nats))
        start, end = self._units[number].start, self._units[promised.last].end
        self._end_span(start)
        self._nodes.append(Chunk(promised.topic, valid_tokens(len(ids)), self._text[start:end]))
        self._topics.append(promised.topic.casefold().split())
        self._begin(end)


def _alike(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
