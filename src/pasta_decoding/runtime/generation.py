"""One answer from the queue to its end: its interpreter's decisions, carried out on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.actions import Action, Append, CloseChunk, Fork, Join, Rewrite
from pasta_decoding.runtime.admission import ResourceRequest, branches_of
from pasta_decoding.runtime.answer import Answer, conclude
from pasta_decoding.runtime.branches import Branches
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.policy import LEAST_QUOTA, Pending, Quota, Runnable, runnable_threads
from pasta_decoding.runtime.prefix_cache import PrefixEntry
from pasta_decoding.runtime.recorder import OutputRecorder
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.sampler import Choice, RowParams, Sampler
from pasta_decoding.runtime.trace import Trace


class Row(NamedTuple):
    """One feed of a forward pass, and the thread that chooses its next token if logits come."""

    generation: Generation
    thread: int
    feed: Feed


@dataclass(slots=True, eq=False)
class Generation:
    """One answer: it waits, is opened, prefilled, decoded, and ends with an answer or an error.

    needs:    the least that it can be written with.
    demand:   what it holds room for, once it is let in.
    quota:    what it was given beyond its needs.
    family:   all that share the beginning of their prompts, itself included. The first feeds it;
              the others are forked off it there.
    shared_tokens: how long that beginning is.
    unfed:    what main is to be fed before it writes: of the prompt, or of what a text join
              rewrites, while no other thread writes.
    prefilled_tokens: and where that goes on.
    forked_after: tokens of the answer that were fed before its first fork; None before that.
    rewrite_s: what a text join took up to now; None while there is none.
    pending:  the token that each thread has chosen and not been fed yet.
    """

    request: Request
    engine: Engine
    interpreter: Interpreter
    trace: Trace
    needs: ResourceRequest
    added_s: float
    quota: Quota = LEAST_QUOTA
    family: Sequence[Generation] = ()
    shared_tokens: int = 0
    opened_s: float | None = None
    unfed: tuple[int, ...] = ()
    prefilled_tokens: int = 0
    forked_after: int | None = None
    rewrite_s: float | None = None
    pending: dict[int, Row] = field(default_factory=dict)
    answer: Answer | None = None
    error: BaseException | None = None
    recorder: OutputRecorder = field(init=False)
    demand: ResourceRequest = field(init=False)
    branches: Branches = field(init=False)

    def __post_init__(self) -> None:
        self.demand = self.needs
        self.branches = Branches(self.engine)
        self.unfed = self.request.prompt
        self.recorder = OutputRecorder(self.interpreter, self.added_s)

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or an error in its place."""
        return self.answer is not None or self.error is not None

    @property
    def is_first(self) -> bool:
        """Whether it opens the engine's request, for itself and for its family."""
        return next((one for one in self.family if not one.is_over), None) is self

    @property
    def next_prompt_tokens(self) -> int:
        """How much of `unfed` may go at once: others are forked off where their prompts differ."""
        if self.prefilled_tokens < self.shared_tokens:
            return self.shared_tokens - self.prefilled_tokens
        return len(self.unfed)

    @property
    def was_fed(self) -> bool:
        """Whether the engine holds any token of it."""
        return self.prefilled_tokens > 0

    @property
    def beginning(self) -> PrefixEntry | None:
        """What main was fed before the first fork; None where its cells are those of a family."""
        if len(self.family) > 1 or not self.branches.live:
            return None
        fed = (one.token for one in self.trace.fed[: self.forked_after])
        prompt = self.request.prompt[: self.prefilled_tokens]
        return PrefixEntry((*prompt, *fed), self.branches.main)

    # From the queue to the end

    def allot(self, quota: Quota) -> None:
        """Set what it is given beyond its needs, before it is opened."""
        branches = branches_of(self.request, quota.threads) - branches_of(
            self.request, LEAST_QUOTA.threads
        )
        self.quota = quota
        self.demand = self.needs + ResourceRequest(quota.ahead_tokens, branches)

    def open(self, now_s: float) -> None:
        """Take room for all that the answer, and those of its family, may come to."""
        room = sum(one.demand.cells for one in self.family)
        self.branches.live[MAIN] = self.engine.open(reserved_tokens=room)
        for one in self.family:
            one.opened_s = now_s
        self.fork_family()

    def begin_like(self, source: Branch, tokens: int) -> None:
        """Take the first tokens of the prompt from a branch that sees them."""
        self.engine.copy(source, self.branches.main, tokens)
        self.unfed, self.prefilled_tokens = self.unfed[tokens:], tokens
        self.trace.reused_tokens = tokens

    def take_prompt(self, tokens: int) -> Row:
        """Return the next `tokens` of `unfed` as a feed; the last one wants logits."""
        ids, self.unfed = self.unfed[:tokens], self.unfed[tokens:]
        positions = tuple(range(self.prefilled_tokens, self.prefilled_tokens + tokens))
        self.prefilled_tokens += tokens
        if self.rewrite_s is None:
            self.trace.prefilled_tokens += tokens
        else:
            self.trace.rewrite(MAIN, ids, positions)
        feed = Feed((self.branches.main,), ids, positions, wants_logits=not self.unfed)
        return Row(self, MAIN, feed)

    def end_prompt(self, cells: int, seconds: float) -> None:
        """Note what the pass took that fed some of `unfed`, with `cells` in use before it."""
        if self.rewrite_s is None:
            self.trace.prefill_s += seconds
            self.fork_family()
            return
        self.rewrite_s += seconds
        if not self.unfed:
            self.trace.end_step(cells, self.rewrite_s)
            self.rewrite_s = None

    def fork_family(self) -> None:
        """Let the others of its family go on where their prompts part from its own."""
        if self.prefilled_tokens != self.shared_tokens:
            return
        for one in self.family:
            if one is not self and not one.is_over:
                one.branches.live[MAIN] = self.engine.fork(self.branches.main)
                one.prefilled_tokens = self.shared_tokens
                one.unfed = one.unfed[self.shared_tokens :]

    def runnable(self) -> Runnable:
        """Tell which threads could be fed in the coming step."""
        pending = Pending(self.pending, self._opening)
        return runnable_threads(
            self.interpreter,
            pending,
            self.quota,
            len(self.branches.live),
            self.request.priority,
        )

    def take(self, threads: Sequence[int]) -> list[Row]:
        """Return what the coming step feeds for `threads`, and put it on record.

        A chunk whose promise has not been fed yet, and is not now, is left out.
        """
        opening = self._opening
        if opening in threads and MAIN not in threads:
            threads = [thread for thread in threads if thread != opening]
        order = sorted(threads, key=lambda thread: (thread != MAIN, thread))
        rows = [self.pending.pop(thread) for thread in order]
        for _, thread, feed in rows:
            self.trace.feed(thread, feed.ids[0], feed.positions[0])
        return rows

    @property
    def _opening(self) -> int | None:
        """The chunk that main's next feed opens, if it does: the last one, which waits for it."""
        row = self.pending.get(MAIN)
        return None if row is None or len(row.feed.branches) < 2 else max(self.pending)

    def choose(self, thread: int, logits_V: FloatArray) -> None:
        """Choose the next token of `thread`, and do what follows from it."""
        index = self.recorder.chosen.get(thread, 0)
        if self.interpreter.writes(thread):  # or another row of the pass has ended it
            allowed = self.interpreter.constraint(thread)
            self._take(thread, self.request.sampler.sample(thread, index, logits_V, allowed))

    def row_params(self, thread: int) -> RowParams:
        """Return what settles the next token of `thread`, for a sampler's request."""
        assert isinstance(self.request.sampler, Sampler), "others want the logits"
        eager = thread == MAIN and self.interpreter.rules.eagerness
        bias = self.interpreter.constraint(thread).bias if eager else {}
        return self.request.sampler.row(thread, self.recorder.chosen.get(thread, 0), bias)

    def accept(
        self, thread: int, row: RowParams, wanted: int, logits: Callable[[], FloatArray]
    ) -> None:
        """Take `wanted`, or what may stand in its place; `logits` fetches the row."""
        assert isinstance(self.request.sampler, Sampler), "others want the logits"
        if self.interpreter.writes(thread):
            allowed = self.interpreter.constraint(thread)
            self._take(thread, self.request.sampler.accept(thread, row, wanted, logits, allowed))

    def _take(self, thread: int, choice: Choice) -> None:
        self.recorder.note(thread, choice)
        self._apply(self.interpreter.on_token(thread, choice.token))
        if self.recorder.has_met_a_stop():
            self.stop()

    def stamp(self, now_s: float) -> None:
        """Note when the events came that are new."""
        self.recorder.stamp(now_s)

    def stop(self) -> None:
        """Let the answer be what there is of it."""
        if not self.interpreter.finished:
            self._apply(self.interpreter.stop())

    def conclude(self, now_s: float) -> None:
        """Free everything and keep the finished answer."""
        self._close()
        self.stamp(now_s)
        self.answer = conclude(
            self.request.prompt,
            self.recorder,
            self.trace,
            seconds=now_s - self.added_s,
            queue_s=(now_s if self.opened_s is None else self.opened_s) - self.added_s,
        )

    def fail(self, error: BaseException) -> None:
        """Free everything of its family, whose cells are the same; there will be no answers."""
        for one in self.family:
            if not one.is_over:
                one.error = error
                one._close()

    def drain_events(self) -> list[Event]:
        """Return the events since the last call."""
        return self.recorder.drain()

    def _close(self) -> None:
        waiting = [one for one in self.family if not (one.branches.live or one.is_over)]
        if self.branches.live:
            for one in waiting:  # for it to be forked off this one: now it opens anew
                one.opened_s = None
        self.branches.close()
        self.pending.clear()

    # What the interpreter decided

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._feed(action, (action.thread,))
                case Fork():
                    self._fork(action)
                case CloseChunk(thread, _, kept):
                    self.pending.pop(thread, None)
                    self.branches.end(thread, kept=kept)
                case Join():
                    self.branches.join_finished()
                case Rewrite(_, _, ids, position):
                    self._rewrite(ids, position)
            self.recorder.tell(action)
        if not self.interpreter.writes(MAIN):
            self.pending.pop(MAIN, None)  # beyond the budget, or in front of a stop string

    def _fork(self, fork: Fork) -> None:
        if self.forked_after is None:
            self.forked_after = len(self.trace.fed)
        self.branches.fork(fork.thread)
        self._feed(fork.close, (MAIN, fork.thread))
        self._feed(fork.opening, (fork.thread,))

    def _feed(self, append: Append, threads: tuple[int, ...]) -> None:
        branches = tuple(self.branches.live[thread] for thread in threads)
        feed = Feed(branches, (append.token,), (append.position,))
        self.pending[append.thread] = Row(self, append.thread, feed)

    def _rewrite(self, ids: tuple[int, ...], position: int) -> None:
        self.branches.go_on_behind_chunk()
        self.unfed, self.prefilled_tokens, self.rewrite_s = ids, position, 0.0
