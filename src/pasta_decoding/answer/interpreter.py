"""The state of one answer while it is being written: tokens in, actions out.

No engine, no clock, no I/O. It decides; the scheduler, which owns the engine, does. Malformed
output, budgets and limits are constraints on the next token: see `constraints`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pasta_decoding.answer.constraints import (
    Budget,
    Constraint,
    Topics,
    WrittenChunk,
    main_constraint,
    open_chunk_constraint,
)
from pasta_decoding.answer.events import (
    Action,
    Append,
    CloseChunk,
    Finished,
    Fork,
    Rewrite,
    Synced,
    Trimmed,
)
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.text import joined_text, tree_of, within_limits
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.layout import (
    MAIN,
    ChunkRun,
    Joining,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    in_reading_order,
)
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.lang.tree import strip


class _MainState(Enum):
    WRITING = auto()
    IN_TOPIC = auto()
    WAITING = auto()
    ENDED = auto()


@dataclass
class Interpreter:
    """One answer: `constraint` says what a thread may write, `on_token` what follows from it.

    Threads may be asked in any order, at any pace: the answer is the same.

    max_positions: how many the model has. No promise is made that could use them up: a scheme may
                   leave some out, and the `text` join also feeds the closings of chunks.
    joining:       how main comes to see chunks. `text` goes with the scheme `shared-max`.
    unjoined:      chunks that main has not seen.
    end:           the token with which main ended the answer; None before, and if a limit did.
    """

    vocabulary: Vocabulary
    scheme: Scheme
    rules: Rules
    prompt_tokens: int
    max_positions: int
    joining: Joining = Joining.kv
    segments: list[Segment] = field(default_factory=list)
    budget: Budget = field(init=False)
    topics: Topics = field(init=False)
    unjoined: list[WrittenChunk] = field(default_factory=list)
    truncated: bool = False
    end: int | None = None
    hit_limit: bool = False
    stopped: bool = False
    _state: _MainState = _MainState.WRITING
    _position: int = 0
    _main_tokens: int = 0
    _run: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._position = self.prompt_tokens
        self.budget = Budget(self.rules)
        self.topics = Topics(self.vocabulary, self.rules)

    @property
    def writing_threads(self) -> list[int]:
        """Threads that will write another token, main first."""
        chunk_threads = [chunk.thread for chunk in self.budget.running]
        return [MAIN, *chunk_threads] if self.writes(MAIN) else chunk_threads

    def writes(self, thread: int) -> bool:
        if thread != MAIN:
            return self.budget.chunks[thread - 1].running
        return self._state in (_MainState.WRITING, _MainState.IN_TOPIC)

    @property
    def finished(self) -> bool:
        return self._state is _MainState.ENDED and not self.writing_threads

    def in_topic(self, thread: int) -> bool:
        return thread == MAIN and self._state is _MainState.IN_TOPIC

    def text_seen(self, thread: int) -> list[int]:
        """Return the ids of the text behind the prompt that `thread` sees, without tags and topics.

        They do not depend on scheduling: main sees chunks from their sync on.
        """
        if thread == MAIN:
            return [*joined_text(self.segments), *self._run]
        chunk = self.budget.chunks[thread - 1]
        return [*joined_text(self.segments[: chunk.segment]), *chunk.ids[1:]]

    # What may come next

    def constraint(self, thread: int) -> Constraint:
        if thread != MAIN:
            chunk = self.budget.chunks[thread - 1]
            has_text = len(chunk.ids) > 1
            if has_text and self.budget.ends(chunk):
                return Constraint.force([self.vocabulary.control.async_close])
            return open_chunk_constraint(self.vocabulary, has_text=has_text)
        if self.budget.is_used_up:
            return Constraint.force(sorted(self.vocabulary.eos_ids))
        if self._state is _MainState.IN_TOPIC:
            return self.topics.constraint()
        return main_constraint(
            self.vocabulary,
            promise=self.promises_left > 0 and self._positions_suffice(),
            sync=self.rules.parallel and bool(self.unjoined),
            eagerness=self.rules.eagerness or 0.0,
        )

    @property
    def promises_left(self) -> int:
        """How many main may make; in the `text` join the closing of each needs a position."""
        max_promises = self.rules.max_chunks if self.rules.parallel else 0
        if self.joining is Joining.text:
            spare_positions = self.max_positions - self.prompt_tokens - self.rules.max_tokens
            max_promises = min(max_promises, spare_positions)
        return max(0, max_promises - len(self.budget.chunks))

    def _positions_suffice(self) -> bool:
        """Would every token of the budget still find a position behind the longest promise?"""
        if self.joining is Joining.text:
            return True
        longest = max(self.vocabulary.control.promise_close)
        skipped = self.scheme.main_next(self._position, longest) - (self._position + 1)
        unjoined_tokens = sum(len(chunk.ids) for chunk in self.unjoined)
        seen_tokens = self.budget.written_tokens - unjoined_tokens
        remaining_tokens = self.rules.max_tokens - seen_tokens
        return self._position + skipped + remaining_tokens <= self.max_positions

    # What follows from a token

    def on_token(self, thread: int, token: int) -> list[Action]:
        """Return what must be done because `thread` wrote `token`, which its constraint allowed."""
        if thread != MAIN:
            actions = self._on_chunk_token(self.budget.chunks[thread - 1], token)
        elif self._state is _MainState.IN_TOPIC:
            actions = self._on_topic_token(token)
        else:
            actions = self._on_main_token(token)
        if self.budget.written_tokens > self.rules.max_tokens:
            actions += self._end_those_beyond()
        return self._finished_with(actions)

    def _on_main_token(self, token: int) -> list[Action]:
        control = self.vocabulary.control
        if token in self.vocabulary.eos_ids:
            return self._end_main(token)
        if token == control.sync:
            self._end_run()
            self._state = _MainState.WAITING
            return self._sync_if_ready()
        if token == control.promise_open:
            self._end_run()
            self._state = _MainState.IN_TOPIC
        else:
            self._run.append(token)
        return [self._feed_main(token)]

    def _on_topic_token(self, token: int) -> list[Action]:
        if token in self.vocabulary.eos_ids:
            return self._end_main(None)  # the half-written promise keeps nothing
        if token in self.vocabulary.promise_close_ids:
            return [self._fork(token)]
        self.topics.ids.append(token)
        return [self._feed_main(token)]

    def _on_chunk_token(self, chunk: WrittenChunk, token: int) -> list[Action]:
        if token != self.vocabulary.control.async_close and token not in self.vocabulary.eos_ids:
            chunk.ids.append(token)
            self.budget.written_tokens += 1
            return [Append(chunk.thread, token, chunk.positions[-1])]
        closed = not self.budget.ends(chunk)
        # A text join goes on with the branch of the first chunk and needs no other.
        keep_branch = self.joining is Joining.kv or chunk is self.unjoined[0]
        close = self._close(chunk, closed=closed, keep_branch=keep_branch)
        return [close, *self._sync_if_ready()]

    def _close(self, chunk: WrittenChunk, *, closed: bool, keep_branch: bool) -> CloseChunk:
        chunk.running = False
        self.segments[chunk.segment] = ChunkRun(tuple(chunk.ids), closed)
        return CloseChunk(chunk.thread, truncated=not closed, keep_branch=keep_branch)

    def _end_those_beyond(self) -> list[Action]:
        """End the threads whose last token is past the budget: nothing more of them is kept."""
        self._end_main(None)
        return [
            self._close(chunk, closed=False, keep_branch=False)
            for chunk in self.budget.running
            if self.budget.tokens_up_to(chunk.thread) > self.rules.max_tokens
        ]

    def _fork(self, close: int) -> Fork:
        control = self.vocabulary.control
        promised = control.promised(close)
        ids = (control.promise_open, *self.topics.ids, close)
        self.segments.append(PromiseRun(ids, promised, forced=int(self.topics.is_full)))
        topic = self.topics.finish()
        closing = self._feed_main(close)
        first = closing.position + 1
        self._position = self.scheme.main_next(closing.position, promised)
        thread = len(self.budget.chunks) + 1
        segment_index = len(self.segments)
        opening = [control.async_open]
        chunk = WrittenChunk(thread, first, promised, self._main_tokens, segment_index, opening)
        self.budget.chunks.append(chunk)
        self.budget.written_tokens += 1
        self.unjoined.append(chunk)
        self.segments.append(ChunkRun(tuple(opening), closed=False))
        self._state = _MainState.WRITING
        return Fork(thread, closing, Append(thread, control.async_open, first), topic, promised)

    def _sync_if_ready(self) -> list[Action]:
        if self._state is not _MainState.WAITING or self.budget.running:
            return []
        if self.budget.is_used_up:
            return self._end_main(None)
        chunks, self.unjoined = self.unjoined, []
        joined = tuple(chunk.thread for chunk in chunks)
        if self.joining is Joining.kv:
            self._position = self.scheme.sync(self._position, [chunk.positions for chunk in chunks])
            actions: list[Action] = [Synced(joined), self._feed_main(self.vocabulary.control.sync)]
        else:
            actions = [self._rewrite(chunks[0], joined)]
        self.segments.append(SyncRun(self.vocabulary.control.sync))
        self._state = _MainState.WRITING
        return actions

    def _rewrite(self, first: WrittenChunk, joined: tuple[int, ...]) -> Rewrite:
        control = self.vocabulary.control
        rest = in_reading_order(self.segments[first.segment + 1 :], control.async_close)
        ids = (control.async_close, *rest, control.sync)
        position = first.positions.stop
        self._position = position + len(ids)
        self._main_tokens += 1  # the others are counted where they were written
        self.budget.written_tokens += 1
        return Rewrite(joined, first.thread, ids, position)

    def _end_main(self, end: int | None) -> list[Action]:
        if self._state is not _MainState.ENDED:
            self._end_run()
            self._state = _MainState.ENDED
            self.end = end
        return []

    def cut_off(self) -> list[Action]:
        """End the answer where it stands: open chunks are closed and marked."""
        self._end_main(None)
        closes: list[Action] = [
            self._close(chunk, closed=False, keep_branch=True) for chunk in self.budget.running
        ]
        return self._finished_with(closes)

    def _finished_with(self, actions: list[Action]) -> list[Action]:
        """Return `actions`; once nobody writes, also what ends the answer and trims it."""
        if not self.finished:
            return actions
        trim: list[Action] = []
        kept_segments, self.stopped = within_limits(self.segments, self.rules, self.vocabulary)
        self.hit_limit = self.budget.is_used_up and not self.stopped
        if self.stopped or self.hit_limit:
            self.segments[:] = kept_segments
            self.end = None
            kept_text = strip(tree_of(kept_segments, self.vocabulary, cut_off=True))
            trim = [Trimmed(len(kept_text))]
        chunks = [segment for segment in self.segments if isinstance(segment, ChunkRun)]
        self.truncated = self.end is None or not all(chunk.closed for chunk in chunks)
        return [*trim, *actions, Finished(self.truncated)]

    def _feed_main(self, token: int) -> Append:
        append = Append(MAIN, token, self._position)
        self._position += 1
        self._main_tokens += 1
        self.budget.written_tokens += 1
        return append

    def _end_run(self) -> None:
        if self._run:
            self.segments.append(MainRun(tuple(self._run)))
            self._run.clear()
