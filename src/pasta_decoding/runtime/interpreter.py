"""The state of one answer while it is being written: tokens in, actions out.

No engine, no clock, no I/O. It decides; the scheduler, which owns the engine, does. Every rule
about malformed output, budgets and limits is here, most of them as constraints on the next token,
so that what comes out is always well formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from pasta_decoding.lang.layout import (
    MAIN,
    ChunkRun,
    Joining,
    PromiseRun,
    Run,
    Segment,
    SyncRun,
    in_reading_order,
)
from pasta_decoding.lang.positions import Extent, Scheme
from pasta_decoding.lang.tree import MAX_TOPIC_WORDS, valid_topic
from pasta_decoding.runtime.actions import Action, Append, CloseChunk, Finish, Fork, Join, Rewrite
from pasta_decoding.runtime.rules import NOTHING, Constraint, Rules
from pasta_decoding.runtime.vocabulary import FRAGMENT, Ids, Vocabulary, fold_topic


class _Main(Enum):
    WRITING = auto()
    IN_TOPIC = auto()
    WAITING = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Chunk:
    thread: int
    first: int
    promised: int
    ids: list[int]
    running: bool = True
    closed: bool = False

    @property
    def next_position(self) -> int:
        return self.first + len(self.ids)


@dataclass
class Interpreter:
    """One answer: `constraint` says what a thread may write, `on_token` what follows from it.

    max_positions: how many the model has; None for any number. They suffice for all tokens, but
                   a scheme may leave positions out, and the `text` join feeds the closings of
                   chunks, too: no promise is made that could use them up.
    joining:       how main comes to see chunks. `text` goes with the scheme `shared-max`.
    end:           the token with which main ended the answer; None while it has not, and if a
                   limit did.
    """

    vocabulary: Vocabulary
    scheme: Scheme
    rules: Rules
    prompt_tokens: int
    max_positions: int | None = None
    joining: Joining = Joining.kv
    segments: list[Segment] = field(default_factory=list)
    fed_tokens: int = 0
    topics: list[str] = field(default_factory=list)
    truncated: bool = False
    end: int | None = None
    hit_limit: bool = False
    _state: _Main = _Main.WRITING
    _position: int = 0
    _run: list[int] = field(default_factory=list)
    _topic: list[int] = field(default_factory=list)
    _chunks: list[_Chunk] = field(default_factory=list)
    _slots: list[int] = field(default_factory=list)
    _unjoined: list[_Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._position = self.prompt_tokens

    @property
    def writing(self) -> list[int]:
        """Threads that will write another token, main first."""
        main = [MAIN] if self._state in (_Main.WRITING, _Main.IN_TOPIC) else []
        return main + [chunk.thread for chunk in self._unjoined if chunk.running]

    @property
    def finished(self) -> bool:
        """Has everything been written?"""
        return self._state is _Main.ENDED and not self.writing

    def in_topic(self, thread: int) -> bool:
        """Is `thread` writing a topic, which is not text of the answer?"""
        return thread == MAIN and self._state is _Main.IN_TOPIC

    def most_tokens(self, thread: int) -> int:
        """Return how many tokens `thread` can write at most until a limit ends it; at least one."""
        left = self._remaining
        if thread != MAIN:
            chunk = self._chunks[thread - 1]
            left = min(left, self._chunk_limit(chunk) - len(chunk.ids) + 1)
        return max(1, left)

    # What may come next

    def constraint(self, thread: int) -> Constraint:
        """Return what `thread` may write next."""
        if thread != MAIN:
            return self._chunk_constraint(self._chunks[thread - 1])
        if self._state is _Main.IN_TOPIC:
            return self._topic_constraint()
        return self._main_constraint()

    def _main_constraint(self) -> Constraint:
        if self._remaining <= 0:
            return Constraint.force(sorted(self.vocabulary.eos_ids))
        control = self.vocabulary.control
        banned = set(control.ids)
        if self._may_promise():
            banned.remove(control.promise_open)
        if self.rules.parallel and self._unjoined:
            banned.remove(control.sync)
        return Constraint(np.array(sorted(banned)))

    def _chunk_constraint(self, chunk: _Chunk) -> Constraint:
        written = len(chunk.ids) - 1
        if written == 0:
            return Constraint(self.vocabulary.not_chunk_start)
        close = self.vocabulary.control.async_close
        if self._remaining <= 0 or written >= self._chunk_limit(chunk):
            return Constraint.force([close])
        return Constraint(np.array(sorted(self.vocabulary.control.ids - {close})))

    def _topic_constraint(self) -> Constraint:
        if self._remaining < 3:  # a closing, ASYNC_OPEN, and a first token of the chunk
            return Constraint.force(sorted(self.vocabulary.eos_ids))
        closes = self.vocabulary.promise_close_ids
        if not self.rules.topic:
            return Constraint(NOTHING, only=closes)
        written = len(self._topic)
        topic = self.vocabulary.decode(self._topic)
        fresh = self._is_fresh(topic)
        if written >= self.rules.max_topic_tokens and fresh:
            return Constraint(NOTHING, only=closes)
        banned = [self.vocabulary.not_in_topic]
        instead = None
        if not fresh:
            banned.append(closes)
        if len(topic.split()) >= MAX_TOPIC_WORDS:
            banned.append(self.vocabulary.starts_word)
            instead = closes if fresh else None  # who wants a fourth word has said three
        if written == 0 and self.rules.topics_begin_apart:
            banned.append(self._used_beginnings())
        banned.append(self._stale_endings(topic, last=written == self.rules.max_topic_tokens - 1))
        return Constraint(np.concatenate(banned), instead=instead)

    def _used_beginnings(self) -> Ids:
        """Return the first tokens of the earlier topics; none of them once there is no other."""
        used = {run.ids[1] for run in self.segments if isinstance(run, PromiseRun)}
        exhausted = len(used) >= self.vocabulary.topic_beginnings
        return NOTHING if exhausted else np.array(sorted(used), dtype=np.int64)

    def _stale_endings(self, topic: str, *, last: bool) -> Ids:
        """Return the tokens that would complete a repetition with no room to grow out of it.

        No room: no further word is allowed, or (`last`) no further token.
        """
        folded = fold_topic(topic)
        rests = [
            earlier[len(folded) :].strip()
            for earlier in self.topics
            if earlier.startswith(folded) and (last or len(earlier.split()) >= MAX_TOPIC_WORDS)
        ]
        repeating = self.vocabulary.ids_of_words(rests)
        return np.union1d(repeating, self.vocabulary.not_topic_end) if last else repeating

    def _is_fresh(self, topic: str) -> bool:
        folded = fold_topic(topic)
        whole = folded[-1:] not in ("", FRAGMENT)
        return whole and folded not in self.topics

    def _may_promise(self) -> bool:
        rules = self.rules
        return (
            rules.parallel
            and len(self._chunks) < rules.max_chunks
            and len(self.writing) < rules.max_threads
            and self._remaining >= rules.max_topic_tokens + 4
            and self._positions_suffice()
        )

    def _positions_suffice(self) -> bool:
        """Would every token of the budget still find a position behind the longest promise?"""
        if self.max_positions is None:
            return True
        if self.joining is Joining.text:
            closings = len(self._chunks) + 1
            return self.prompt_tokens + self.rules.max_tokens + closings <= self.max_positions
        longest = max(self.vocabulary.control.promise_close)
        skipped = self.scheme.main_next(self._position, longest) - (self._position + 1)
        left = self.rules.max_tokens - self.fed_tokens
        return self._position + skipped + left <= self.max_positions

    def _chunk_limit(self, chunk: _Chunk) -> int:
        return max(self.rules.min_chunk_tokens, int(chunk.promised * self.rules.chunk_factor))

    @property
    def _remaining(self) -> int:
        """Tokens left of the budget, less one for each empty chunk and for a SYNC that waits."""
        empty = sum(chunk.running and len(chunk.ids) == 1 for chunk in self._unjoined)
        waiting = self._state is _Main.WAITING
        return self.rules.max_tokens - self.fed_tokens - empty - waiting

    # What follows from a token

    def on_token(self, thread: int, token: int) -> list[Action]:
        """Return what must be done because `thread` wrote `token`, which its constraint allowed."""
        if thread != MAIN:
            return self._on_chunk_token(self._chunks[thread - 1], token)
        if self._state is _Main.IN_TOPIC:
            return self._on_topic_token(token)
        return self._on_main_token(token)

    def _on_main_token(self, token: int) -> list[Action]:
        control = self.vocabulary.control
        if token in self.vocabulary.eos_ids:
            return self._end_main(None if self._remaining <= 0 else token)
        if token == control.sync:
            self._end_run()
            self._state = _Main.WAITING
            return self._sync_if_ready()
        if token == control.promise_open:
            self._end_run()
            self._state = _Main.IN_TOPIC
            self._topic = []
        else:
            self._run.append(token)
        return [self._feed_main(token)]

    def _on_topic_token(self, token: int) -> list[Action]:
        if token in self.vocabulary.eos_ids:
            return self._end_main(None)  # the half-written promise keeps nothing
        if token in self.vocabulary.promise_close_ids:
            return [self._fork(token)]
        self._topic.append(token)
        return [self._feed_main(token)]

    def _on_chunk_token(self, chunk: _Chunk, token: int) -> list[Action]:
        control = self.vocabulary.control
        if token != control.async_close and token not in self.vocabulary.eos_ids:
            chunk.ids.append(token)
            self.fed_tokens += 1
            return [Append(chunk.thread, token, chunk.next_position - 1)]
        chunk.running = False
        chunk.closed = not self._chunk_constraint(chunk).forced
        self.truncated |= not chunk.closed
        self.hit_limit |= self._remaining <= 0
        self._store(chunk)
        # A text join goes on with the branch of the first chunk and needs no other.
        kept = self.joining is Joining.kv or chunk is self._unjoined[0]
        closing = CloseChunk(chunk.thread, truncated=not chunk.closed, kept=kept)
        return [closing, *self._sync_if_ready(), *self._finish_if_done()]

    def _fork(self, close: int) -> Fork:
        control = self.vocabulary.control
        promised = control.promised(close)
        topic = valid_topic(self.vocabulary.decode(self._topic)) or ""
        forced = len(self._topic) >= self.rules.max_topic_tokens
        ids = (control.promise_open, *self._topic, close)
        self.segments.append(PromiseRun(ids, promised, forced=int(forced)))
        closing = self._feed_main(close)
        first = self.scheme.chunk_start(closing.position, promised)
        self._position = self.scheme.main_next(closing.position, promised)
        chunk = _Chunk(len(self._chunks) + 1, first, promised, [control.async_open])
        self._chunks.append(chunk)
        self._unjoined.append(chunk)
        self._slots.append(len(self.segments))
        self.segments.append(ChunkRun((control.async_open,), closed=False))
        self.topics.append(fold_topic(topic))
        self.fed_tokens += 1
        self._state = _Main.WRITING
        opening = Append(chunk.thread, control.async_open, first)
        return Fork(chunk.thread, closing, opening, topic, promised)

    def _sync_if_ready(self) -> list[Action]:
        if self._state is not _Main.WAITING or any(chunk.running for chunk in self._unjoined):
            return []
        chunks, self._unjoined = self._unjoined, []
        actions = self._join(chunks) if self.joining is Joining.kv else self._rewrite(chunks)
        self.segments.append(SyncRun(self.vocabulary.control.sync))
        self._state = _Main.WRITING
        return actions

    def _join(self, chunks: Sequence[_Chunk]) -> list[Action]:
        extents = [Extent(chunk.first, chunk.next_position - 1, chunk.promised) for chunk in chunks]
        self._position = self.scheme.sync(self._position, extents)
        joined = tuple(chunk.thread for chunk in chunks)
        return [Join(joined), self._feed_main(self.vocabulary.control.sync)]

    def _rewrite(self, chunks: Sequence[_Chunk]) -> list[Action]:
        control, first = self.vocabulary.control, chunks[0]
        behind = self.segments[self._slots[first.thread - 1] + 1 :]
        rest = in_reading_order(behind, control.async_close)
        ids = (control.async_close, *rest, control.sync)
        position = first.next_position
        self._position = position + len(ids)
        self.fed_tokens += 1  # the others are counted where they were written
        joined = tuple(chunk.thread for chunk in chunks)
        return [Rewrite(joined, first.thread, ids, position)]

    def _end_main(self, end: int | None) -> list[Action]:
        self._end_run()
        self._state = _Main.ENDED
        self.end, truncated = end, end is None
        self.truncated |= truncated
        self.hit_limit |= truncated
        return self._finish_if_done()

    def _finish_if_done(self) -> list[Action]:
        return [Finish(self.truncated)] if self.finished else []

    def stop(self) -> list[Action]:
        """End the answer where it stands (time is up): open chunks are closed and marked."""
        self._end_run()
        running = [chunk for chunk in self._unjoined if chunk.running]
        for chunk in running:
            chunk.running = False
            self._store(chunk)
        self._state = _Main.ENDED
        self.truncated = True
        closings = [CloseChunk(chunk.thread, truncated=True) for chunk in running]
        return [*closings, *self._finish_if_done()]

    def _feed_main(self, token: int) -> Append:
        append = Append(MAIN, token, self._position)
        self._position += 1
        self.fed_tokens += 1
        return append

    def _end_run(self) -> None:
        if self._run:
            self.segments.append(Run(tuple(self._run)))
            self._run.clear()

    def _store(self, chunk: _Chunk) -> None:
        self.segments[self._slots[chunk.thread - 1]] = ChunkRun(tuple(chunk.ids), chunk.closed)
