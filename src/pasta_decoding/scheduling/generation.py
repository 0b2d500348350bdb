"""One answer from the queue to its end: its interpreter's decisions, carried out on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pasta_decoding.answer.events import (
    Action,
    Append,
    CloseChunk,
    Fork,
    Progress,
    Rewrite,
    Synced,
)
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.record import Answer, OutputRecorder, Trace
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import RowParams, sample_token
from pasta_decoding.answer.vocabulary import IdArray
from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.scheduling.admission import (
    LEAST_QUOTA,
    LEAST_SHARED,
    PrefixEntry,
    Quota,
    ResourceRequest,
    resources_of,
)
from pasta_decoding.scheduling.policy import RunnableThreads


class ThreadFeed(NamedTuple):
    """One feed of a forward pass, and the thread that chooses its next token if logits come."""

    generation: Generation
    thread: int
    feed: Feed


@dataclass(slots=True, eq=False)
class Generation:
    """One answer: it waits, is opened, prefilled, decoded, and ends with an answer or an error.

    quota:    what it was given beyond its needs, before it is opened.
    unfed:    tokens that main is fed before it writes: of the prompt, or of a text join's rewrite,
              during which no other thread writes.
    prefilled_tokens: the position at which `unfed` goes on.
    forked_after: tokens of the answer that were fed before its first fork; None before that.
    rewrite_s: what a text join took up to now; None while there is none.
    pending:  what each thread has chosen and not been fed yet.
    live:     the branches of the threads that live; none before it is opened and after its end.
    joined_branch: sees what finished chunks wrote, until main joins it. One for all of them: an
                   engine may have few branches.
    _prompt_ids: what penalties count of the prompt: no tags, no ends.
    """

    request: Request
    engine: Engine
    interpreter: Interpreter
    added_s: float
    quota: Quota = LEAST_QUOTA
    opened_s: float | None = None
    unfed: tuple[int, ...] = field(init=False)
    prefilled_tokens: int = 0
    forked_after: int | None = None
    rewrite_s: float | None = None
    pending: dict[int, Feed] = field(default_factory=dict)
    live: dict[int, Branch] = field(default_factory=dict)
    joined_branch: Branch | None = None
    answer: Answer | None = None
    error: BaseException | None = None
    recorder: OutputRecorder = field(init=False)
    trace: Trace = field(init=False)
    _prompt_ids: IdArray = field(init=False)

    def __post_init__(self) -> None:
        known = self.interpreter.vocabulary
        words = set(self.request.prompt) - known.control.ids - known.eos_ids
        self._prompt_ids = np.array(sorted(words), dtype=np.int64)
        self.unfed = self.request.prompt
        self.recorder = OutputRecorder(self.interpreter, self.unfed, self.added_s)
        self.trace = self.recorder.trace

    @property
    def resources(self) -> ResourceRequest:
        return resources_of(self.request, self.interpreter.joining, self.quota)

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def result(self) -> Answer | None:
        """Return the finished answer, None before. Raises the error that ended it, if one did."""
        if self.error is not None:
            raise self.error
        return self.answer

    @property
    def computed(self) -> int:
        """Grows with all that is computed for it; 0 while it waits to be opened."""
        return 0 if self.opened_s is None else 1 + self.prefilled_tokens + len(self.trace.fed)

    def drain(self) -> Progress | None:
        return self.recorder.drain(len(self.trace.step_s))

    def open(self, now_s: float) -> None:
        self.live[MAIN] = self.engine.open(reserved_tokens=self.resources.slots)
        self.opened_s = now_s

    def copy_prefix(self, source: Branch, tokens: int) -> None:
        """Take the first tokens of the prompt from a branch that sees them."""
        self.engine.copy(source, self.live[MAIN], tokens)
        self.unfed, self.prefilled_tokens = self.unfed[tokens:], tokens
        self.trace.reused_tokens = tokens

    def take_prompt(self, tokens: int) -> ThreadFeed:
        """Return the next `tokens` of `unfed` as a feed; the last one wants logits."""
        ids, self.unfed = self.unfed[:tokens], self.unfed[tokens:]
        positions = tuple(range(self.prefilled_tokens, self.prefilled_tokens + tokens))
        self.prefilled_tokens += tokens
        if self.rewrite_s is None:
            self.trace.prefilled_tokens += tokens
        else:
            self.trace.rewritten_tokens += tokens
            for token, position in zip(ids, positions, strict=True):
                self.trace.feed(MAIN, token, position)
        feed = Feed((self.live[MAIN],), ids, positions, wants_logits=not self.unfed)
        return ThreadFeed(self, MAIN, feed)

    def end_step(self, now_s: float, seconds: float) -> None:
        self.recorder.stamp(now_s)
        self.trace.step_s.append(seconds)

    def end_prompt(self, now_s: float, seconds: float) -> None:
        self.recorder.stamp(now_s)
        if self.rewrite_s is None:
            self.trace.prefill_s += seconds
            return
        self.rewrite_s += seconds
        if not self.unfed:
            self.trace.step_s.append(self.rewrite_s)
            self.rewrite_s = None

    def runnable(self) -> RunnableThreads:
        """Return the threads that can write: the first unfinished text, and others in its quota."""
        if len(self.pending) == 1:
            return RunnableThreads(tuple(self.pending), self.request.priority)
        order = sorted(self.pending, key=lambda thread: (thread == MAIN, thread))
        if (opening := self._opening) is not None:  # main's feed comes before what it opens
            order.remove(MAIN)
            order.insert(order.index(opening), MAIN)
        longest = 0
        if self.interpreter.in_topic(MAIN):
            longest = max(self.interpreter.vocabulary.control.promise_close)
            if len(self.live) >= self.quota.threads:  # main may begin a thread too many
                order = [thread for thread in order if thread != MAIN]
        threads = self.interpreter.budget.runnable(order, self.quota.ahead_tokens, longest)
        return RunnableThreads(threads, self.request.priority)

    def take(self, threads: Sequence[int]) -> list[ThreadFeed]:
        """Return what the coming step feeds for `threads`, and put it on record.

        A chunk whose promise has not been fed yet, and is not now, is left out.
        """
        opening = self._opening
        if opening in threads and MAIN not in threads:
            threads = [thread for thread in threads if thread != opening]
        rows = [ThreadFeed(self, thread, self.pending.pop(thread)) for thread in sorted(threads)]
        for _, thread, feed in rows:
            self.trace.feed(thread, feed.ids[0], feed.positions[0])
        return rows

    @property
    def _opening(self) -> int | None:
        """The chunk that main's next feed opens, if it does: the last one, which waits for it."""
        feed = self.pending.get(MAIN)
        return None if feed is None or len(feed.branches) < 2 else max(self.pending)

    def choose(self, thread: int, logits_V: FloatArray) -> None:
        row = self.row_params(thread)
        self.accept(thread, row, sample_token(logits_V, row), lambda: logits_V)

    def row_params(self, thread: int) -> RowParams:
        """Return how the next token of `thread` is sampled."""
        sampler, interpreter = self.request.sampler, self.interpreter
        index = self.recorder.chosen.get(thread, 0)
        if interpreter.in_topic(thread):
            return sampler.row(thread, index, {})
        eager = thread == MAIN and interpreter.rules.eagerness
        bias = interpreter.constraint(thread).bias if eager else {}
        if not sampler.params.penalises:
            return sampler.row(thread, index, bias)
        return sampler.row(thread, index, bias, interpreter.text_seen(thread), self._prompt_ids)

    def accept(
        self, thread: int, row: RowParams, wanted: int, logits: Callable[[], FloatArray]
    ) -> None:
        """Take `wanted`, or what may stand in its place; `logits` fetches the row."""
        if self.interpreter.writes(thread):  # or another row of the pass has ended it
            allowed = self.interpreter.constraint(thread)
            choice = self.request.sampler.accept(row, wanted, logits, allowed)
            self._apply(self.recorder.take(thread, choice))

    def cut_off(self) -> None:
        self._apply(self.recorder.cut_off())

    def conclude(self, now_s: float) -> None:
        self._close()
        let_in_s = now_s if self.opened_s is None else self.opened_s
        self.answer = self.recorder.conclude(now_s, queue_s=let_in_s - self.added_s)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._close()

    def _close(self) -> None:
        held = [] if self.joined_branch is None else [self.joined_branch]
        for branch in [*held, *self.live.values()]:
            self.engine.close(branch)
        self.live.clear()
        self.pending.clear()
        self.joined_branch = None

    def release_prefix(self) -> PrefixEntry | None:
        """Free everything but what main was fed before the first fork, if that is long.

        The prefix cache takes that over.
        """
        if not self.prefilled_tokens or not self.live:
            return None
        fed = (one.token for one in self.trace.fed[: self.forked_after])
        ids = (*self.request.prompt[: self.prefilled_tokens], *fed)
        if len(ids) < LEAST_SHARED:
            return None
        entry = PrefixEntry(ids, self.live.pop(MAIN))
        self._close()
        self.engine.shrink(entry.branch, len(ids))
        return entry

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._feed(action, (action.thread,))
                case Fork():
                    self._fork(action)
                case CloseChunk(thread, _, kept):
                    self.pending.pop(thread, None)
                    self._end_chunk(self.live.pop(thread), kept=kept)
                case Synced() if self.joined_branch is not None:
                    self.engine.join(self.live[MAIN], [self.joined_branch])
                    self.joined_branch = None
                case Rewrite(_, _, ids, position):
                    assert self.joined_branch is not None, "kept from the first chunk for this"
                    self.engine.close(self.live[MAIN])
                    self.live[MAIN], self.joined_branch = self.joined_branch, None
                    self.unfed, self.prefilled_tokens, self.rewrite_s = ids, position, 0.0
        if not self.interpreter.writes(MAIN):
            self.pending.pop(MAIN, None)  # beyond the budget, or in front of a stop string

    def _fork(self, fork: Fork) -> None:
        if self.forked_after is None:
            self.forked_after = len(self.trace.fed)
        self.live[fork.thread] = self.engine.fork(self.live[MAIN])
        self._feed(fork.close, (MAIN, fork.thread))
        self._feed(fork.opening, (fork.thread,))

    def _end_chunk(self, branch: Branch, *, kept: bool) -> None:
        if not kept:
            self.engine.close(branch)
        elif self.joined_branch is None:
            self.joined_branch = branch
        else:
            self.engine.join(self.joined_branch, [branch])

    def _feed(self, append: Append, threads: tuple[int, ...]) -> None:
        branches = tuple(self.live[thread] for thread in threads)
        self.pending[append.thread] = Feed(branches, (append.token,), (append.position,))
