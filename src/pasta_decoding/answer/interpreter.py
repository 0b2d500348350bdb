"""The state of one answer while it is being written: tokens in, actions out.

The interpreter has no engine, no clock and no I/O; the scheduler carries out its actions. Grammar,
budget and limits act as constraints on the next token: see `constraints`.
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
    """One answer that is being written.

    `constraint` returns the constraint on a thread's next token; `on_token` takes the token and
    returns the actions that follow. The order in which threads write does not change the answer.

    max_positions: positions of the model. Main may not make a promise that could use them up: some
                   schemes skip positions, and the `text` join also feeds ASYNC_CLOSE.
    joining:       how main comes to see chunks. `text` requires the scheme `shared-max`.
    segments:      the answer so far, in reading order, without main's current run of text.
    unjoined:      chunks that main does not see yet.
    truncated:     did a limit or a stop string cut the answer or a chunk? Set at the end.
    end:           the token with which main ended the answer; None if something else did.
    hit_limit:     did the token budget end the answer? Set at the end.
    stopped:       did a stop string end the answer? Set at the end.
    _position:     position of main's next token.
    _main_tokens:  tokens of main so far.
    _run:          text of main that is not yet in `segments`.
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
        """Will `thread` write another token? Not while it waits for chunks."""
        if thread != MAIN:
            return self.budget.chunks[thread - 1].running
        return self._state in (_MainState.WRITING, _MainState.IN_TOPIC)

    @property
    def finished(self) -> bool:
        return self._state is _MainState.ENDED and not self.writing_threads

    def in_topic(self, thread: int) -> bool:
        return thread == MAIN and self._state is _MainState.IN_TOPIC

    def text_seen(self, thread: int) -> list[int]:
        """Return the ids of the answer's text that `thread` sees, without tags and topics.

        They do not depend on scheduling: main sees chunks from their SYNC on.
        """
        if thread == MAIN:
            return [*joined_text(self.segments), *self._run]
        chunk = self.budget.chunks[thread - 1]
        return [*joined_text(self.segments[: chunk.segment]), *chunk.ids[1:]]

    # Constraints

    def constraint(self, thread: int) -> Constraint:
        """Return the constraint on the next token of `thread`."""
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
            sync_bias=self.rules.sync_bias,
        )

    @property
    def promises_left(self) -> int:
        """Promises that main may still make. Under the `text` join ASYNC_CLOSE needs positions."""
        max_promises = self.rules.max_chunks if self.rules.parallel else 0
        if self.joining is Joining.text:
            spare_positions = self.max_positions - self.prompt_tokens - self.rules.max_tokens
            max_promises = min(max_promises, spare_positions)
        return max(0, max_promises - len(self.budget.chunks))

    def _positions_suffice(self) -> bool:
        """Is there a position for every token of the budget even after the longest promise?"""
        if self.joining is Joining.text:
            return True
        longest = max(self.vocabulary.control.promise_close)
        skipped = self.scheme.main_next(self._position, longest) - (self._position + 1)
        unjoined_tokens = sum(len(chunk.ids) for chunk in self.unjoined)
        seen_tokens = self.budget.written_tokens - unjoined_tokens
        remaining_tokens = self.rules.max_tokens - seen_tokens
        return self._position + skipped + remaining_tokens <= self.max_positions

    # Tokens

    def on_token(self, thread: int, token: int) -> list[Action]:
        """Take a token that the constraint of `thread` allows; return the actions to carry out."""
        if thread != MAIN:
            actions = self._on_chunk_token(self.budget.chunks[thread - 1], token)
        elif self._state is _MainState.IN_TOPIC:
            actions = self._on_topic_token(token)
        else:
            actions = self._on_main_token(token)
        if self.budget.written_tokens > self.rules.max_tokens:
            actions += self._end_past_budget()
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
            return self._end_main(None)  # the half-written promise is dropped
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
        # Under the `text` join main continues from the branch of the first chunk alone.
        keep_branch = self.joining is Joining.kv or chunk is self.unjoined[0]
        close = self._close(chunk, closed=closed, keep_branch=keep_branch)
        return [close, *self._sync_if_ready()]

    def _close(self, chunk: WrittenChunk, *, closed: bool, keep_branch: bool) -> CloseChunk:
        chunk.running = False
        self.segments[chunk.segment] = ChunkRun(tuple(chunk.ids), closed)
        return CloseChunk(chunk.thread, truncated=not closed, keep_branch=keep_branch)

    def _end_past_budget(self) -> list[Action]:
        """End the threads whose last token is past the budget: further text would be trimmed."""
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
        self._position = self.scheme.main_next(closing.position, promised)
        thread = len(self.budget.chunks) + 1
        opening = Append(thread, control.async_open, closing.position + 1)
        chunk = WrittenChunk(
            thread,
            first_position=opening.position,
            promised=promised,
            main_tokens=self._main_tokens,
            segment=len(self.segments),
            ids=[control.async_open],
        )
        self.budget.chunks.append(chunk)
        self.budget.written_tokens += 1
        self.unjoined.append(chunk)
        self.segments.append(ChunkRun((control.async_open,), closed=False))
        self._state = _MainState.WRITING
        return Fork(thread, closing, opening, topic, promised)

    def _sync_if_ready(self) -> list[Action]:
        if self._state is not _MainState.WAITING or self.budget.running:
            return []
        if self.budget.is_used_up:
            return self._end_main(None)
        chunks = self.unjoined
        self.unjoined = []
        threads = tuple(chunk.thread for chunk in chunks)
        if self.joining is Joining.kv:
            self._position = self.scheme.sync(self._position, [chunk.positions for chunk in chunks])
            actions: list[Action] = [Synced(threads), self._feed_main(self.vocabulary.control.sync)]
        else:
            actions = [self._rewrite(chunks[0], threads)]
        self.segments.append(SyncRun(self.vocabulary.control.sync))
        self._state = _MainState.WRITING
        return actions

    def _rewrite(self, first: WrittenChunk, threads: tuple[int, ...]) -> Rewrite:
        control = self.vocabulary.control
        later_ids = in_reading_order(self.segments[first.segment + 1 :], control.async_close)
        ids = (control.async_close, *later_ids, control.sync)
        position = first.positions.stop
        self._position = position + len(ids)
        self._main_tokens += 1  # SYNC; the other ids were counted when they were written
        self.budget.written_tokens += 1
        return Rewrite(threads, first.thread, ids, position)

    def _end_main(self, end_token: int | None) -> list[Action]:
        if self._state is not _MainState.ENDED:
            self._end_run()
            self._state = _MainState.ENDED
            self.end = end_token
        return []

    def cut_off(self) -> list[Action]:
        """End the answer now. Its open chunks end, truncated."""
        self._end_main(None)
        closes: list[Action] = [
            self._close(chunk, closed=False, keep_branch=True) for chunk in self.budget.running
        ]
        return self._finished_with(closes)

    def _finished_with(self, actions: list[Action]) -> list[Action]:
        """Return `actions`; if no thread writes any more, trim the answer and finish it."""
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
