"""The step scheduler: it owns an engine and advances all live threads of all answers together.

One `step` is one forward pass: feed what was decided, choose every thread's next token, and ask
each answer's interpreter what follows. The interpreter decides; this file does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.runtime.actions import Action, Append, CloseChunk, Finish, Fork, Join
from pasta_decoding.runtime.answer import Answer, conclude
from pasta_decoding.runtime.events import Closed, Delta, Event, Finished, Opened, Synced
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Chooser
from pasta_decoding.runtime.text import ThreadText
from pasta_decoding.runtime.trace import Trace
from pasta_decoding.runtime.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be written. `max_seconds` None means no limit on the wall clock."""

    prompt: tuple[int, ...]
    chooser: Chooser
    rules: Rules = field(default_factory=Rules)
    max_seconds: float | None = None


@dataclass(slots=True)
class _Live:
    """One answer in the engine."""

    request: Request
    interpreter: Interpreter
    trace: Trace
    began_s: float
    branches: dict[int, Branch]
    texts: dict[int, ThreadText]
    feeds: list[tuple[int, Feed]] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    overruled: int = 0
    events: list[Event] = field(default_factory=list)

    def take_feeds(self) -> list[tuple[_Live, int, Feed]]:
        """Return what the coming step feeds, and put it on record."""
        feeds, self.feeds = self.feeds, []
        for thread, feed in feeds:
            self.trace.feed(thread, feed.ids[0], feed.positions[0])
        return [(self, thread, feed) for thread, feed in feeds]


class Scheduler:
    """Answers any number of requests at once over one engine. Not for several threads."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        scheme: Scheme,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._scheme = scheme
        self._clock = clock
        self._numbers = count()
        self._live: dict[int, _Live] = {}
        self._answers: dict[int, Answer] = {}

    @property
    def busy(self) -> bool:
        """Is any answer being written?"""
        return bool(self._live)

    def add(self, request: Request) -> int:
        """Prefill a request and choose its first token; return its number.

        Raises PastaError if prompt and budget do not fit the model; nothing is held then.
        """
        self._check_fit(request)
        began_s = self._clock()
        rules = request.rules
        prompt_tokens = len(request.prompt)
        branch = self._engine.open(room=prompt_tokens + rules.max_tokens)
        prefill = Feed((branch,), request.prompt, tuple(range(prompt_tokens)))
        (logits_V,) = self._engine.step([prefill])
        interpreter = Interpreter(self._vocabulary, self._scheme, rules, len(request.prompt))
        trace = Trace(len(request.prompt), prefill_s=self._clock() - began_s)
        texts = {MAIN: ThreadText(self._vocabulary.decode)}
        live = _Live(request, interpreter, trace, began_s, {MAIN: branch}, texts)
        number = next(self._numbers)
        self._live[number] = live
        self._choose(live, MAIN, logits_V)
        self._retire(number, live)
        return number

    def step(self) -> None:
        """Advance every live thread by one token, in one forward pass."""
        began_s = self._clock()
        cells = self._engine.cells_in_use
        batch = [row for live in self._live.values() for row in live.take_feeds()]
        logits_FV = self._engine.step([feed for _, _, feed in batch])
        wanting = [(live, thread) for live, thread, feed in batch if feed.wants_logits]
        for (live, thread), logits_V in zip(wanting, logits_FV, strict=True):
            self._choose(live, thread, logits_V)
        now_s = self._clock()
        for number, live in list(self._live.items()):
            live.trace.end_step(cells, now_s - began_s)
            self._retire(number, live)

    def drain_events(self, number: int) -> list[Event]:
        """Return and forget the events of a request since the last call."""
        source = self._live[number] if number in self._live else self._answers[number]
        events = list(source.events)
        source.events.clear()
        return events

    def result(self, number: int) -> Answer | None:
        """Return the finished answer; None while it is being written."""
        return self._answers.get(number)

    def cancel(self, number: int) -> None:
        """End a request at once and free all that it holds; its result is what there was."""
        live = self._live.get(number)
        if live is not None:
            self._apply(live, live.interpreter.stop())
            self._retire(number, live)

    def close(self) -> None:
        """Cancel everything."""
        for number in list(self._live):
            self.cancel(number)

    def _check_fit(self, request: Request) -> None:
        if not request.prompt:
            raise PastaError("the prompt is empty", hint="Give at least one token of prompt.")
        prompt_tokens, answer_tokens = len(request.prompt), request.rules.max_tokens
        if prompt_tokens + answer_tokens > self._engine.max_positions:
            raise PastaError(
                f"a prompt of {prompt_tokens} tokens and an answer of up to {answer_tokens} do not "
                f"fit the model's {self._engine.max_positions} positions",
                hint="Use a shorter prompt, or allow fewer tokens for the answer.",
            )

    def _choose(self, live: _Live, thread: int, logits_V: FloatArray) -> None:
        index = live.written.get(thread, 0)
        live.written[thread] = index + 1
        allowed = live.interpreter.constraint(thread)
        choice = live.request.chooser.choose(thread, index, logits_V, allowed)
        live.overruled += choice.overruled or self._is_end_in_chunk(thread, choice.token)
        self._apply(live, live.interpreter.on_token(thread, choice.token))

    def _is_end_in_chunk(self, thread: int, token: int) -> bool:
        return thread != MAIN and token in self._vocabulary.ends

    def _apply(self, live: _Live, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._feed(live, action, (action.thread,))
                    self._say(live, action.thread, action.token)
                case Fork(thread, closing, opening, topic, promised):
                    live.branches[thread] = self._engine.fork(live.branches[MAIN])
                    live.texts[thread] = ThreadText(self._vocabulary.decode, keep_edge=True)
                    self._feed(live, closing, (MAIN, thread))
                    self._feed(live, opening, (thread,))
                    live.events += [*self._rest(live, MAIN), Opened(thread, topic, promised)]
                case CloseChunk(thread, truncated):
                    live.events += [*self._rest(live, thread), Closed(thread, truncated)]
                case Join(threads):
                    children = [live.branches.pop(thread) for thread in threads]
                    self._engine.join(live.branches[MAIN], children)
                    live.events += [*self._rest(live, MAIN), Synced(threads)]
                case Finish(truncated):
                    live.events += [*self._rest(live, MAIN), Finished(truncated)]

    def _feed(self, live: _Live, append: Append, threads: tuple[int, ...]) -> None:
        branches = tuple(live.branches[thread] for thread in threads)
        feed = Feed(branches, (append.token,), (append.position,))
        live.feeds.append((append.thread, feed))

    def _say(self, live: _Live, thread: int, token: int) -> None:
        if token in self._vocabulary.binding.ids or live.interpreter.in_topic(thread):
            return
        if text := live.texts[thread].add(token):
            live.events.append(Delta(thread, text))

    def _rest(self, live: _Live, thread: int) -> list[Event]:
        text = live.texts[thread].end()
        return [Delta(thread, text)] if text else []

    def _retire(self, number: int, live: _Live) -> None:
        """Take a finished answer out of the engine, and one whose time is up with it."""
        limit = live.request.max_seconds
        if not live.interpreter.finished:
            if limit is None or self._clock() - live.began_s < limit:
                return
            self._apply(live, live.interpreter.stop())
        for branch in live.branches.values():
            self._engine.close(branch)
        del self._live[number]
        self._answers[number] = conclude(
            live.request.prompt,
            live.interpreter,
            live.trace,
            live.events,
            overruled=live.overruled,
            seconds=self._clock() - live.began_s,
        )
