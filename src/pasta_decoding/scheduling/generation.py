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
from pasta_decoding.scheduling.admission import MIN_QUOTA, Quota, ResourceRequest, resources_of
from pasta_decoding.scheduling.policy import RunnableThreads


@dataclass(frozen=True, slots=True, eq=False)
class FedPrefix:
    """The first tokens that an answer was fed, and a branch that sees them."""

    ids: tuple[int, ...]
    branch: Branch


class ThreadFeed(NamedTuple):
    """One feed of a forward pass. If it wants logits, `thread` chooses its next token from them."""

    generation: Generation
    thread: int
    feed: Feed


@dataclass(slots=True, eq=False)
class Generation:
    """One answer on an engine: queued, opened, prefilled, decoded, ended by an answer or an error.

    quota:    resources beyond the minimum; set before the answer is opened.
    unfed:    ids that main is fed before it writes: of the prompt, or of a text join's rewrite. No
              other thread writes during a rewrite.
    prefilled_tokens: the position of the first of the `unfed` ids.
    forked_after: tokens of the answer that were fed before its first fork; None before that.
    rewrite_s: seconds that the running text join has taken up to now; None if there is none.
    pending:  the feed of each thread that has chosen its next token.
    branches: the open branch of each thread; empty before the answer is opened and after its end.
    joined_branch: sees what ended chunks wrote, until main joins it. All of them share this one,
                   since an engine may have few branches.
    _prompt_words: the ids of the prompt that penalties count: no control tokens, no ends.
    """

    request: Request
    engine: Engine
    interpreter: Interpreter
    added_s: float
    quota: Quota = MIN_QUOTA
    opened_s: float | None = None
    unfed: tuple[int, ...] = field(init=False)
    prefilled_tokens: int = 0
    forked_after: int | None = None
    rewrite_s: float | None = None
    pending: dict[int, Feed] = field(default_factory=dict)
    branches: dict[int, Branch] = field(default_factory=dict)
    joined_branch: Branch | None = None
    answer: Answer | None = None
    error: BaseException | None = None
    recorder: OutputRecorder = field(init=False)
    trace: Trace = field(init=False)
    _prompt_words: IdArray = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = self.interpreter.vocabulary
        words = set(self.request.prompt) - vocabulary.control.ids - vocabulary.eos_ids
        self._prompt_words = np.array(sorted(words), dtype=np.int64)
        self.unfed = self.request.prompt
        self.recorder = OutputRecorder(self.interpreter, self.request.prompt, self.added_s)
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
        """A number that grows with each token fed for this answer; 0 while it is queued."""
        if self.opened_s is None:
            return 0
        return 1 + self.prefilled_tokens + len(self.trace.fed)

    def drain(self) -> Progress | None:
        """Return what happened since the last call; None if nothing did."""
        return self.recorder.drain(len(self.trace.step_s))

    # The prompt

    def open(self, now_s: float) -> None:
        """Reserve all slots that the answer can need. Raises PastaError if the engine has none."""
        self.branches[MAIN] = self.engine.open(reserved_tokens=self.resources.slots)
        self.opened_s = now_s

    def copy_prefix(self, source: Branch, tokens: int) -> None:
        """Begin with the first `tokens` of the prompt, copied from a branch that sees them."""
        self.engine.copy(source, self.branches[MAIN], tokens)
        self.unfed = self.unfed[tokens:]
        self.prefilled_tokens = tokens
        self.trace.reused_tokens = tokens

    @property
    def fed_prompt(self) -> FedPrefix:
        """The part of the prompt that main's branch sees. The branch stays this answer's."""
        return FedPrefix(self.request.prompt[: self.prefilled_tokens], self.branches[MAIN])

    def take_prompt(self, tokens: int) -> ThreadFeed:
        """Return the next `tokens` of `unfed` as a feed; the last one wants logits."""
        ids = self.unfed[:tokens]
        self.unfed = self.unfed[tokens:]
        positions = tuple(range(self.prefilled_tokens, self.prefilled_tokens + tokens))
        self.prefilled_tokens += tokens
        if self.rewrite_s is None:
            self.trace.prefilled_tokens += tokens
        else:
            self.trace.rewritten_tokens += tokens
            for token, position in zip(ids, positions, strict=True):
                self.trace.feed(MAIN, token, position)
        feed = Feed((self.branches[MAIN],), ids, positions, wants_logits=not self.unfed)
        return ThreadFeed(self, MAIN, feed)

    def end_prompt(self, now_s: float, seconds: float) -> None:
        """Record a pass of `seconds` that fed some of `unfed`."""
        self.recorder.stamp(now_s)
        if self.rewrite_s is None:
            self.trace.prefill_s += seconds
            return
        self.rewrite_s += seconds
        if not self.unfed:
            self.trace.step_s.append(self.rewrite_s)
            self.rewrite_s = None

    # The threads

    def runnable(self) -> RunnableThreads:
        """Return the threads that may write in this step, in reading order.

        The first unfinished one always may; the others as far as `quota` allows.
        """
        if len(self.pending) == 1:
            return RunnableThreads(tuple(self.pending), self.request.priority)
        order = sorted(self.pending.keys() - {MAIN})
        main_may_write = MAIN in self.pending
        longest_promise = 0
        if self.interpreter.in_topic(MAIN):
            # Main's next token may end the topic, and so begin a thread.
            longest_promise = max(self.interpreter.vocabulary.control.promise_close)
            if len(self.branches) >= self.quota.threads:
                main_may_write = False
        if main_may_write:
            # Main's text is the last one, but its feed comes before the chunk that it opens.
            opening = self._opening_chunk
            main_index = len(order) if opening is None else order.index(opening)
            order.insert(main_index, MAIN)
        budget = self.interpreter.budget
        threads = budget.runnable(order, self.quota.ahead_tokens, longest_promise)
        return RunnableThreads(threads, self.request.priority)

    def take(self, threads: Sequence[int]) -> list[ThreadFeed]:
        """Return the feeds of `threads` for the coming step, and record them in the trace.

        A chunk is left out if main's feed, which opens it, is not among them.
        """
        opening = self._opening_chunk
        thread_feeds = []
        for thread in sorted(threads):
            if thread == opening and MAIN not in threads:
                continue
            feed = self.pending.pop(thread)
            self.trace.feed(thread, feed.ids[0], feed.positions[0])
            thread_feeds.append(ThreadFeed(self, thread, feed))
        return thread_feeds

    @property
    def _opening_chunk(self) -> int | None:
        """The chunk that main's next feed opens, if any. It is the last one, and waits for it."""
        feed = self.pending.get(MAIN)
        if feed is None or len(feed.branches) < 2:
            return None
        return max(self.pending)

    def choose(self, thread: int, logits_V: FloatArray) -> None:
        """Let `thread` choose its next token from logits."""
        row = self.row_params(thread)
        self.accept(thread, row, sample_token(logits_V, row), lambda: logits_V)

    def row_params(self, thread: int) -> RowParams:
        """Return how the next token of `thread` is sampled."""
        sampler = self.request.sampler
        interpreter = self.interpreter
        index = self.recorder.token_counts.get(thread, 0)
        if interpreter.in_topic(thread):
            return sampler.row(thread, index, {})
        rules = interpreter.rules
        is_biased = thread == MAIN and (rules.eagerness or rules.sync_bias)
        bias = interpreter.constraint(thread).bias if is_biased else {}
        if not sampler.params.penalises:
            return sampler.row(thread, index, bias)
        text = interpreter.text_seen(thread)
        return sampler.row(thread, index, bias, text, self._prompt_words)

    def accept(
        self, thread: int, row: RowParams, winner: int, fetch_logits: Callable[[], FloatArray]
    ) -> None:
        """Let `thread` write the token `winner`, or what its constraint puts in the place of it.

        fetch_logits: returns logits_V; called only if `winner` alone is not enough.
        """
        if not self.interpreter.writes(thread):
            return  # another thread of this pass has ended it
        allowed = self.interpreter.constraint(thread)
        choice = self.request.sampler.accept(row, winner, fetch_logits, allowed)
        self._apply(self.recorder.take(thread, choice))

    def end_step(self, now_s: float, seconds: float) -> None:
        """Record a step of `seconds` in which threads of this answer wrote."""
        self.recorder.stamp(now_s)
        self.trace.step_s.append(seconds)

    # The end

    def cut_off(self) -> None:
        """End all threads where they are. `conclude` makes the answer."""
        self._apply(self.recorder.cut_off())

    def release_prefix(self, min_tokens: int) -> FedPrefix | None:
        """Give up all branches but main's, cut back to the tokens before the first fork.

        The caller owns the branch of the prefix. Returns None, and gives up nothing, if the prefix
        has fewer than `min_tokens` tokens.
        """
        if not self.prefilled_tokens or not self.branches:
            return None
        written = tuple(fed.token for fed in self.trace.fed[: self.forked_after])
        ids = self.request.prompt[: self.prefilled_tokens] + written
        if len(ids) < min_tokens:
            return None
        prefix = FedPrefix(ids, self.branches.pop(MAIN))
        self._close_branches()
        self.engine.shrink(prefix.branch, len(ids))
        return prefix

    def conclude(self, now_s: float) -> None:
        """Close all branches and make `answer`, of a queued request as well."""
        self._close_branches()
        queue_end_s = now_s if self.opened_s is None else self.opened_s
        self.answer = self.recorder.conclude(now_s, queue_s=queue_end_s - self.added_s)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._close_branches()

    def _close_branches(self) -> None:
        if self.joined_branch is not None:
            self.engine.close(self.joined_branch)
        for branch in self.branches.values():
            self.engine.close(branch)
        self.joined_branch = None
        self.branches.clear()
        self.pending.clear()

    # What the interpreter decides

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._feed(action, (action.thread,))
                case Fork():
                    self._fork(action)
                case CloseChunk(thread, _, awaits_join):
                    self.pending.pop(thread, None)
                    self._end_chunk(self.branches.pop(thread), awaits_join=awaits_join)
                case Synced() if self.joined_branch is not None:
                    self.engine.join(self.branches[MAIN], [self.joined_branch])
                    self.joined_branch = None
                case Rewrite(_, _, ids, position):
                    self._rewrite(ids, position)
        if not self.interpreter.writes(MAIN):
            self.pending.pop(MAIN, None)  # beyond the budget, or in front of a stop string

    def _feed(self, append: Append, threads: tuple[int, ...]) -> None:
        branches = tuple(self.branches[thread] for thread in threads)
        self.pending[append.thread] = Feed(branches, (append.token,), (append.position,))

    def _fork(self, fork: Fork) -> None:
        if self.forked_after is None:
            self.forked_after = len(self.trace.fed)
        self.branches[fork.thread] = self.engine.fork(self.branches[MAIN])
        self._feed(fork.close, (MAIN, fork.thread))
        self._feed(fork.opening, (fork.thread,))

    def _end_chunk(self, branch: Branch, *, awaits_join: bool) -> None:
        if not awaits_join:
            self.engine.close(branch)
        elif self.joined_branch is None:
            self.joined_branch = branch
        else:
            self.engine.join(self.joined_branch, [branch])

    def _rewrite(self, ids: tuple[int, ...], position: int) -> None:
        """Let main go on behind the first chunk: it will be fed `ids` from `position` on."""
        assert self.joined_branch is not None, (
            "the branch of the first chunk stays open for a rewrite"
        )
        self.engine.close(self.branches[MAIN])
        self.branches[MAIN] = self.joined_branch
        self.joined_branch = None
        self.unfed = ids
        self.prefilled_tokens = position
        self.rewrite_s = 0.0
