"""The async driver: an answer written by plain requests for completions.

Each thread's context is a plain sequence of ids, so chunks are joined as text. A promise opens a
request for its chunk while main's goes on; SYNC ends main's, and when the chunks are done a new
one begins with everything in reading order. Prefix caches keep what requests share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pasta_decoding.lang.layout import MAIN, Joining
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.thread import ThreadStream
from pasta_decoding.runtime.actions import Action, Append, CloseChunk, Fork, Rewrite
from pasta_decoding.runtime.answer import Answer, conclude
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.recorder import OutputRecorder
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.runtime.trace import Fed, Trace
from pasta_decoding.runtime.vocabulary import Vocabulary

OnNews = Callable[[Sequence[Event], int], None]
"""Told of new events, and of how many steps the answer had at unlimited width."""


class AnswerWriter:
    """Writes one answer; `run` it once. Everything belongs to one event loop.

    contexts: what each thread that writes has before it, from the prompt on.
    steps:    the step that fed each thread's last token, as the layout counts them.
    """

    def __init__(
        self, request: Request, vocabulary: Vocabulary, pool: ReplicaPool, on_news: OnNews
    ) -> None:
        prompt_tokens, most = len(request.prompt), pool.service.max_positions
        self.request, self.pool, self._on_news = request, pool, on_news
        self.interpreter = Interpreter(
            vocabulary, SHARED_MAX, request.rules, prompt_tokens, most, Joining.text, request.stops
        )
        self.contexts, self.steps = {MAIN: list(request.prompt)}, {MAIN: 0}
        self.trace = Trace(prompt_tokens)
        self.recorder = OutputRecorder(self.interpreter, time.perf_counter())
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> Answer:
        """Write the answer. If one thread fails for good, the others are cancelled.

        Raises RemoteError then. Cancelling it ends every request.
        """
        limit_s, timer = self.request.max_seconds, None
        if limit_s is not None:
            timer = asyncio.get_running_loop().call_later(limit_s, self.stop)
        try:
            with self.pool.lease() as self.lease:
                async with asyncio.TaskGroup() as self._group:
                    self._start(MAIN)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__
        finally:
            if timer is not None:
                timer.cancel()
        return self._conclude()

    def stop(self) -> None:
        """Let the answer be what there is of it."""
        if self.interpreter.finished:
            return
        self._apply(self.interpreter.stop())
        self._end_tasks()
        self._report()

    def _conclude(self) -> Answer:
        now_s = time.perf_counter()
        self.recorder.stamp(now_s)
        self.trace.sent = self.lease.sent
        seconds = now_s - self.recorder.began_s
        return conclude(
            self.request.prompt, self.recorder, self.trace, seconds=seconds, queue_s=0.0
        )

    def _start(self, thread: int) -> None:
        self._tasks[thread] = self._group.create_task(self._write(thread))

    def _end_tasks(self) -> None:
        """End what others wrote, of whom nothing more is wanted."""
        for thread in self._tasks.keys() - set(self.interpreter.writing):
            task = self._tasks.pop(thread)
            if task is not asyncio.current_task():
                task.cancel()

    async def _write(self, thread: int) -> None:
        """Let `thread` write until it ends; main, until it waits."""
        stream = ThreadStream(self, thread)
        try:
            while self.interpreter.writes(thread):
                choice = await stream.choose()
                self.recorder.note(thread, choice)
                self._apply(self.interpreter.on_token(thread, choice.token))
                if self.recorder.has_met_a_stop():
                    self.stop()  # before it is told: what is trimmed stands in front of it
                self._end_tasks()
                self._report()
                if thread == MAIN and choice.token == self.interpreter.vocabulary.control.sync:
                    return  # it goes on behind the join, in a task of its own
        finally:
            await stream.put_down()

    @property
    def sampler(self) -> Sampler:
        """How its servers are to choose: they do so by themselves."""
        assert isinstance(self.request.sampler, Sampler), "a server knows no other"
        return self.request.sampler

    def _report(self) -> None:
        self.recorder.stamp(time.perf_counter())
        if news := self.recorder.drain():
            self._on_news(news, max(self.steps.values()))

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append(thread, token, position):
                    self._feed(thread, token, position)
                case Fork(thread, closing, opening):
                    self._feed(MAIN, closing.token, closing.position)
                    self.contexts[thread] = list(self.contexts[MAIN])
                    self.steps[thread] = self.steps[MAIN] - 1  # both are fed in one step
                    self._feed(thread, opening.token, opening.position)
                    self._start(thread)
                case CloseChunk(thread, _, kept) if not kept:
                    del self.contexts[thread]
                case Rewrite(_, first, ids, position):
                    self.contexts[MAIN] = self.contexts.pop(first)
                    self._feed_again(ids, position)
                    self._start(MAIN)
            self.recorder.tell(action)

    def _feed(self, thread: int, token: int, position: int) -> None:
        self.contexts[thread].append(token)
        self.steps[thread] += 1
        self.trace.fed.append(Fed(self.steps[thread], thread, token, position))

    def _feed_again(self, ids: Sequence[int], position: int) -> None:
        self.contexts[MAIN] += ids
        self.steps[MAIN] = step = max(self.steps.values()) + 1
        self.trace.rewritten_tokens += len(ids)
        self.trace.fed += [Fed(step, MAIN, token, position + n) for n, token in enumerate(ids)]
