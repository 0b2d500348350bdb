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
from pasta_decoding.lang.tree import MAX_TOPIC_WORDS, strip, valid_topic
from pasta_decoding.runtime.actions import (
    Action,
    Append,
    CloseChunk,
    Finish,
    Fork,
    Join,
    Rewrite,
    Trim,
)
from pasta_decoding.runtime.cut import first_tokens, tokens_of, tokens_to_stop
from pasta_decoding.runtime.rules import NOTHING, Constraint, Rules
from pasta_decoding.runtime.text import tree_of
from pasta_decoding.runtime.vocabulary import FRAGMENT, Ids, Vocabulary, fold_topic


class _Main(Enum):
    WRITING = auto()
    IN_TOPIC = auto()
    WAITING = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Chunk:
    """One chunk. `main_tokens`: those of main that stand before it in reading order."""

    thread: int
    first: int
    promised: int
    main_tokens: int
    ids: list[int]
    running: bool = True
    closed: bool = False

    @property
    def next_position(self) -> int:
        return self.first + len(self.ids)


@dataclass
class Interpreter:
    """One answer: `constraint` says what a thread may write, `on_token` what follows from it.

    Threads may be asked in any order, at any pace: the answer is the same. Its budget and its stop
    strings end it at a place in reading order, and what was written beyond is trimmed.

    max_positions: how many the model has; None for any number. They suffice for all tokens, but
                   a scheme may leave positions out, and the `text` join feeds the closings of
                   chunks, too: no promise is made that could use them up.
    joining:       how main comes to see chunks. `text` goes with the scheme `shared-max`.
    end:           the token with which main ended the answer; None while it has not, and if a
                   limit did.
    stops:         strings of which the first one to be complete ends the answer.
    written_tokens: tokens of all threads, those included that will be trimmed.
    """

    vocabulary: Vocabulary
    scheme: Scheme
    rules: Rules
    prompt_tokens: int
    max_positions: int | None = None
    joining: Joining = Joining.kv
    stops: Sequence[str] = ()
    segments: list[Segment] = field(default_factory=list)
    written_tokens: int = 0
    topics: list[str] = field(default_factory=list)
    truncated: bool = False
    end: int | None = None
    hit_limit: bool = False
    stopped: bool = False
    trimmed: bool = False
    _state: _Main = _Main.WRITING
    _position: int = 0
    _main_tokens: int = 0
    _joined_tokens: int = 0
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
        main = [MAIN] if self.writes(MAIN) else []
        return main + [chunk.thread for chunk in self._unjoined if chunk.running]

    def writes(self, thread: int) -> bool:
        """Will `thread` write another token?"""
        if thread != MAIN:
            return self._chunks[thread - 1].running
        return self._state in (_Main.WRITING, _Main.IN_TOPIC)

    @property
    def trimmed_tokens(self) -> int:
        """Tokens that were written and are no part of the answer, once it has ended."""
        return self.written_tokens - tokens_of(self.segments)

    @property
    def finished(self) -> bool:
        """Has everything been written?"""
        return self._state is _Main.ENDED and not self.writing

    def in_topic(self, thread: int) -> bool:
        """Is `thread` writing a topic, which is not text of the answer?"""
        return thread == MAIN and self._state is _Main.IN_TOPIC

    def most_tokens(self, thread: int) -> int:
        """Return how many tokens `thread` can write at most until a limit ends it; at least one."""
        left = self.rules.max_tokens - self.place(thread)
        if thread != MAIN:
            left = min(left, self._left_of(self._chunks[thread - 1]))
        return max(1, left)

    def place(self, thread: int) -> int:
        """Return how many tokens stand up to the last one of `thread`, in reading order.

        Those that have been written, that is: the number grows with the threads before it.
        """
        if thread == MAIN:
            return self.written_tokens
        chunk = self._chunks[thread - 1]
        return chunk.main_tokens + sum(len(one.ids) for one in self._chunks[:thread])

    def expected_place(self, thread: int = MAIN) -> int:
        """Return what `place` is if the chunks before `thread` become as long as promised."""
        before = [chunk for chunk in self._unjoined if chunk.running]
        if thread != MAIN:
            before = [chunk for chunk in before if chunk.thread < thread]
        return self.place(thread) + sum(max(0, one.promised - len(one.ids)) for one in before)

    def most_to_come(self) -> int:
        """Return how many tokens the running chunks may still write, by their own limits."""
        return sum(self._left_of(chunk) for chunk in self._unjoined if chunk.running)

    # What may come next

    def constraint(self, thread: int) -> Constraint:
        """Return what `thread` may write next."""
        if thread != MAIN:
            return self._chunk_constraint(self._chunks[thread - 1])
        if self._state is _Main.IN_TOPIC:
            return self._topic_constraint()
        return self._main_constraint()

    def _main_constraint(self) -> Constraint:
        if self._exhausted:
            return Constraint.force(sorted(self.vocabulary.eos_ids))
        control = self.vocabulary.control
        banned = set(control.ids)
        if self._may_promise():
            banned.remove(control.promise_open)
        if self.rules.parallel and self._unjoined:
            banned.remove(control.sync)
        return Constraint(np.array(sorted(banned)))

    def _chunk_constraint(self, chunk: _Chunk) -> Constraint:
        if len(chunk.ids) == 1:
            return Constraint(self.vocabulary.not_chunk_start)
        close = self.vocabulary.control.async_close
        if self._left_of(chunk) <= 0 or self._ends(chunk):
            return Constraint.force([close])
        return Constraint(np.array(sorted(self.vocabulary.control.ids - {close})))

    def _topic_constraint(self) -> Constraint:
        if self._exhausted:
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
        return rules.parallel and len(self._chunks) < rules.max_chunks and self._positions_suffice()

    def _positions_suffice(self) -> bool:
        """Would every token of the budget still find a position behind the longest promise?"""
        if self.max_positions is None:
            return True
        if self.joining is Joining.text:
            closings = len(self._chunks) + 1
            return self.prompt_tokens + self.rules.max_tokens + closings <= self.max_positions
        longest = max(self.vocabulary.control.promise_close)
        skipped = self.scheme.main_next(self._position, longest) - (self._position + 1)
        left = self.rules.max_tokens - self._main_tokens - self._joined_tokens
        return self._position + skipped + left <= self.max_positions

    @property
    def longest_chunk(self) -> int:
        """How many tokens a chunk may have at most, its opening not among them."""
        return self._limit_of(max(self.vocabulary.control.promise_close))

    def _limit_of(self, promised: int) -> int:
        return max(self.rules.min_chunk_tokens, int(promised * self.rules.chunk_factor))

    def _left_of(self, chunk: _Chunk) -> int:
        """Return how many tokens `chunk` may still have by its own limit."""
        return self._limit_of(chunk.promised) + 1 - len(chunk.ids)

    @property
    def _exhausted(self) -> bool:
        """Is the budget used up before main's next token?"""
        return self.written_tokens >= self.rules.max_tokens

    def _ends(self, chunk: _Chunk) -> bool:
        """Is the budget used up before the chunk's next token?"""
        return self._exhausted and self.place(chunk.thread) >= self.rules.max_tokens

    # What follows from a token

    def on_token(self, thread: int, token: int) -> list[Action]:
        """Return what must be done because `thread` wrote `token`, which its constraint allowed."""
        if thread != MAIN:
            actions = self._on_chunk_token(self._chunks[thread - 1], token)
        elif self._state is _Main.IN_TOPIC:
            actions = self._on_topic_token(token)
        else:
            actions = self._on_main_token(token)
        if self.written_tokens > self.rules.max_tokens:
            actions += self._end_those_beyond()
        return self._finished_with(actions)

    def _on_main_token(self, token: int) -> list[Action]:
        control = self.vocabulary.control
        if token in self.vocabulary.eos_ids:
            return self._end_main(token)
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
            self.written_tokens += 1
            return [Append(chunk.thread, token, chunk.next_position - 1)]
        closed = not self._chunk_constraint(chunk).forced
        # A text join goes on with the branch of the first chunk and needs no other.
        kept = self.joining is Joining.kv or chunk is self._unjoined[0]
        return [self._close(chunk, closed=closed, kept=kept), *self._sync_if_ready()]

    def _close(self, chunk: _Chunk, *, closed: bool, kept: bool) -> CloseChunk:
        chunk.running, chunk.closed = False, closed
        self.segments[self._slots[chunk.thread - 1]] = ChunkRun(tuple(chunk.ids), closed)
        return CloseChunk(chunk.thread, truncated=not closed, kept=kept)

    def _end_those_beyond(self) -> list[Action]:
        """End the threads whose last token is past the budget: nothing more of them is kept."""
        if self._state is not _Main.ENDED:
            self._end_main(None)
        running = [chunk for chunk in self._unjoined if chunk.running]
        return [
            self._close(chunk, closed=False, kept=False)
            for chunk in running
            if self.place(chunk.thread) > self.rules.max_tokens
        ]

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
        number = len(self._chunks) + 1
        chunk = _Chunk(number, first, promised, self._main_tokens, [control.async_open])
        self._chunks.append(chunk)
        self._unjoined.append(chunk)
        self._slots.append(len(self.segments))
        self.segments.append(ChunkRun((control.async_open,), closed=False))
        self.topics.append(fold_topic(topic))
        self.written_tokens += 1
        self._state = _Main.WRITING
        opening = Append(chunk.thread, control.async_open, first)
        return Fork(chunk.thread, closing, opening, topic, promised)

    def _sync_if_ready(self) -> list[Action]:
        if self._state is not _Main.WAITING or any(chunk.running for chunk in self._unjoined):
            return []
        if self._exhausted:
            return self._end_main(None)
        chunks, self._unjoined = self._unjoined, []
        self._joined_tokens += sum(len(chunk.ids) for chunk in chunks)
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
        self._main_tokens += 1  # the others are counted where they were written
        self.written_tokens += 1
        joined = tuple(chunk.thread for chunk in chunks)
        return [Rewrite(joined, first.thread, ids, position)]

    def _end_main(self, end: int | None) -> list[Action]:
        self._end_run()
        self._state = _Main.ENDED
        self.end = end
        return []

    def stop(self) -> list[Action]:
        """End the answer where it stands: open chunks are closed and marked.

        Time is up, or a stop string has been found; then nothing that was kept is still open.
        """
        if self._state is not _Main.ENDED:
            self._end_main(None)
        running = [chunk for chunk in self._unjoined if chunk.running]
        return self._finished_with([self._close(one, closed=False, kept=True) for one in running])

    def _finished_with(self, actions: list[Action]) -> list[Action]:
        """Return `actions`, and what ends the answer once nobody writes any more."""
        if not self.finished:
            return actions
        trim = self._trim()
        chunks = [segment for segment in self.segments if isinstance(segment, ChunkRun)]
        self.truncated = self.end is None or not all(chunk.closed for chunk in chunks)
        return [*trim, *actions, Finish(self.truncated)]

    def _trim(self) -> list[Action]:
        """Keep what is within the budget, and before a stop string's end."""
        self.hit_limit = self._exhausted
        kept = first_tokens(self.segments, self.rules.max_tokens)
        stop = tokens_to_stop(kept, self.stops, self.vocabulary)
        if stop is not None:
            self.stopped, self.hit_limit, kept = True, False, first_tokens(kept, stop)
        if stop is None and not self.hit_limit:
            return []
        self.segments[:], self.end, self.trimmed = kept, None, True
        return [Trim(len(strip(tree_of(kept, self.vocabulary, cut_off=True))))]

    def _feed_main(self, token: int) -> Append:
        append = Append(MAIN, token, self._position)
        self._position += 1
        self._main_tokens += 1
        self.written_tokens += 1
        return append

    def _end_run(self) -> None:
        if self._run:
            self.segments.append(Run(tuple(self._run)))
            self._run.clear()
