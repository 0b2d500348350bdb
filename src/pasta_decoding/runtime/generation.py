"""One answer from the queue to its end: its interpreter's decisions, carried out on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.actions import Action, Append, CloseChunk, Finish, Fork, Join, Rewrite
from pasta_decoding.runtime.admission import Load
from pasta_decoding.runtime.answer import Answer, conclude
from pasta_decoding.runtime.events import Closed, Delta, Event, Finished, Opened, Synced
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.text import ThreadText
from pasta_decoding.runtime.trace import Trace
from pasta_decoding.runtime.vocabulary import Vocabulary


class Row(NamedTuple):
    """One feed of a forward pass, and the thread that chooses its next token if logits come."""

    generation: Generation
    thread: int
    feed: Feed


@dataclass(slots=True, eq=False)
class Generation:
    """One answer: it waits, is opened, prefilled, decoded, and ends with an answer or an error.

    load:     the most that it may come to.
    family:   all that share the beginning of their prompts, itself included. The first feeds it;
              the others are forked off it there.
    shared_tokens: how long that beginning is.
    unfed:    what main is to be fed before it writes: of the prompt, or of what a text join
              rewrites, while no other thread writes.
    prefilled_tokens: and where that goes on.
    rewrite_s: what a text join took up to now; None while there is none.
    branches: those of the live threads; none before it is opened and after its end.
    finished: the branch that sees what finished chunks wrote, until main joins it. One for all of
              them: an engine may have few branches.
    """

    request: Request
    engine: Engine
    interpreter: Interpreter
    trace: Trace
    load: Load
    added_s: float
    family: Sequence[Generation] = ()
    shared_tokens: int = 0
    opened_s: float | None = None
    unfed: tuple[int, ...] = ()
    prefilled_tokens: int = 0
    rewrite_s: float | None = None
    branches: dict[int, Branch] = field(default_factory=dict)
    finished: Branch | None = None
    texts: dict[int, ThreadText] = field(default_factory=dict)
    feeds: list[Row] = field(default_factory=list)
    chosen: dict[int, int] = field(default_factory=dict)
    overruled: int = 0
    events: list[Event] = field(default_factory=list)
    event_s: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    drained_events: int = 0
    answer: Answer | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.unfed = self.request.prompt
        self.texts[MAIN] = ThreadText(self._vocabulary.decode)

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
    def _vocabulary(self) -> Vocabulary:
        return self.interpreter.vocabulary

    # From the queue to the end

    def open(self, now_s: float) -> None:
        """Take room for all that the answer, and those of its family, may come to."""
        room = sum(one.load.cells for one in self.family)
        self.branches[MAIN] = self.engine.open(room=room)
        for one in self.family:
            one.opened_s = now_s
        self.fork_family()

    def take_prompt(self, tokens: int) -> Row:
        """Return the next `tokens` of `unfed` as a feed; the last one wants logits."""
        ids, self.unfed = self.unfed[:tokens], self.unfed[tokens:]
        positions = tuple(range(self.prefilled_tokens, self.prefilled_tokens + tokens))
        self.prefilled_tokens += tokens
        if self.rewrite_s is None:
            self.trace.prefilled_tokens += tokens
        else:
            self.trace.rewrite(MAIN, ids, positions)
        feed = Feed((self.branches[MAIN],), ids, positions, wants_logits=not self.unfed)
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
                one.branches[MAIN] = self.engine.fork(self.branches[MAIN])
                one.prefilled_tokens = self.shared_tokens
                one.unfed = one.unfed[self.shared_tokens :]

    def take_feeds(self) -> list[Row]:
        """Return what the coming step feeds, and put it on record."""
        rows, self.feeds = self.feeds, []
        for _, thread, feed in rows:
            self.trace.feed(thread, feed.ids[0], feed.positions[0])
        return rows

    def choose(self, thread: int, logits_V: FloatArray) -> None:
        """Choose the next token of `thread`, and do what follows from it."""
        index = self.chosen.get(thread, 0)
        self.chosen[thread] = index + 1
        allowed = self.interpreter.constraint(thread)
        choice = self.request.chooser.choose(thread, index, logits_V, allowed)
        self.overruled += choice.overruled or self._is_end_in_chunk(thread, choice.token)
        self._apply(self.interpreter.on_token(thread, choice.token))

    def stamp(self, now_s: float) -> None:
        """Note when the events came that are new."""
        elapsed_s = now_s - self.added_s
        if self.first_token_s is None and self.chosen:
            self.first_token_s = elapsed_s
        self.event_s += [elapsed_s] * (len(self.events) - len(self.event_s))

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
            self.interpreter,
            self.trace,
            tuple(self.events),
            event_s=tuple(self.event_s),
            first_token_s=self.first_token_s,
            overruled=self.overruled,
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
        coming = self.events[self.drained_events :]
        self.drained_events = len(self.events)
        return coming

    def _close(self) -> None:
        waiting = [one for one in self.family if not (one.branches or one.is_over)]
        if self.branches:
            for one in waiting:  # for it to be forked off this one: now it opens anew
                one.opened_s = None
        held = [] if self.finished is None else [self.finished]
        for branch in [*held, *self.branches.values()]:
            self.engine.close(branch)
        self.branches.clear()
        self.finished = None

    # What the interpreter decided

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._feed(action, (action.thread,))
                    self._say(action.thread, action.token)
                case Fork(thread, closing, opening, topic, promised):
                    self.branches[thread] = self.engine.fork(self.branches[MAIN])
                    self.texts[thread] = ThreadText(self._vocabulary.decode, keep_edge=True)
                    self._feed(closing, (MAIN, thread))
                    self._feed(opening, (thread,))
                    self.events += [*self._rest(MAIN), Opened(thread, topic, promised)]
                case CloseChunk(thread, truncated, kept):
                    self._end_branch(self.branches.pop(thread), kept=kept)
                    self.events += [*self._rest(thread), Closed(thread, truncated)]
                case Join(threads):
                    self._join_finished()
                    self.events += [*self._rest(MAIN), Synced(threads)]
                case Rewrite(threads, _, ids, position):
                    self._rewrite(ids, position)
                    self.events += [*self._rest(MAIN), Synced(threads)]
                case Finish(truncated):
                    self.events += [*self._rest(MAIN), Finished(truncated)]

    def _feed(self, append: Append, threads: tuple[int, ...]) -> None:
        branches = tuple(self.branches[thread] for thread in threads)
        feed = Feed(branches, (append.token,), (append.position,))
        self.feeds.append(Row(self, append.thread, feed))

    def _end_branch(self, branch: Branch, *, kept: bool) -> None:
        if not kept:
            self.engine.close(branch)
        elif self.finished is None:
            self.finished = branch
        else:
            self.engine.join(self.finished, [branch])

    def _join_finished(self) -> None:
        if self.finished is not None:
            self.engine.join(self.branches[MAIN], [self.finished])
            self.finished = None

    def _rewrite(self, ids: tuple[int, ...], position: int) -> None:
        assert self.finished is not None, "the first chunk's branch is kept for this"
        self.engine.close(self.branches[MAIN])
        self.branches[MAIN], self.finished = self.finished, None
        self.unfed, self.prefilled_tokens, self.rewrite_s = ids, position, 0.0

    def _say(self, thread: int, token: int) -> None:
        if token in self._vocabulary.binding.ids or self.interpreter.in_topic(thread):
            return
        if text := self.texts[thread].add(token):
            self.events.append(Delta(thread, text))

    def _rest(self, thread: int) -> list[Event]:
        text = self.texts[thread].end()
        return [Delta(thread, text)] if text else []

    def _is_end_in_chunk(self, thread: int, token: int) -> bool:
        return thread != MAIN and token in self._vocabulary.ends
