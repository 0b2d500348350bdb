"""The async driver: an answer written by plain requests for completions.

Each thread's context is a plain sequence of ids, so chunks are joined as text. A promise opens a
request for its chunk while main's goes on. SYNC ends main's; when the chunks are done, a new one
begins with everything in reading order. Prefix caches keep what requests share.

A server with Pasta's logits processor obeys the `GuidedParams` of a request. With others,
`logit_bias` forbids what a whole request may not write. A forbidden token that comes all the same
ends its request; a request of a single token, with the right bias, brings the next best.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.events import Action, Append, CloseChunk, Fork, Progress, Rewrite
from pasta_decoding.answer.guided import guided_params
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.record import Answer, FedToken, OutputRecorder
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import SampledToken
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.layout import MAIN, Joining
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.remote.client import ReplicaPool
from pasta_decoding.remote.stream import BAN, MAX_BIASES, Completion, RemoteError


class AnswerWriter:
    """Writes one answer, as `Generation` on an engine; `run` it once, all in one event loop.

    task:     what runs it.
    on_news:  called when there is more to drain.
    contexts: what each thread that writes has before it, from the prompt on.
    steps:    the step that fed each thread's last token, as the layout counts them.
    """

    def __init__(
        self,
        request: Request,
        vocabulary: Vocabulary,
        pool: ReplicaPool,
        on_news: Callable[[], object],
    ) -> None:
        prompt_tokens, most = len(request.prompt), pool.service.max_positions
        self.request, self.pool, self._on_news = request, pool, on_news
        self.sampler = request.sampler
        self.interpreter = Interpreter(
            vocabulary, SHARED_MAX, request.rules, prompt_tokens, most, Joining.text
        )
        self.task: asyncio.Task[Answer]
        self.contexts, self.steps = {MAIN: list(request.prompt)}, {MAIN: 0}
        self.recorder = OutputRecorder(self.interpreter, request.prompt, time.perf_counter())
        self.trace = self.recorder.trace
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def computed(self) -> int:
        return 1 + len(self.trace.fed)

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() else None

    def result(self) -> Answer | None:
        return self.task.result() if self.task.done() else None

    def drain(self) -> Progress | None:
        return self.recorder.drain(max(self.steps.values()))

    async def run(self) -> Answer:
        """Write the answer. If one thread fails for good, the others are cancelled.

        Raises RemoteError then. Cancelling it ends every request.
        """
        queue_s = time.perf_counter() - self.recorder.began_s
        limit_s, timer = self.request.rules.max_seconds, None
        if limit_s is not None:
            timer = asyncio.get_running_loop().call_later(limit_s - queue_s, self.cut_off)
        try:
            with self.pool.lease() as self.lease:
                self.trace.sent = self.lease.sent
                async with asyncio.TaskGroup() as self._group:
                    self._start(MAIN)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__
        finally:
            if timer is not None:
                timer.cancel()
        return self.recorder.conclude(time.perf_counter(), queue_s)

    def cut_off(self) -> None:
        self._follow(self.recorder.cut_off())

    def _follow(self, actions: Sequence[Action]) -> None:
        self._apply(actions)
        self._end_tasks()
        self.recorder.stamp(time.perf_counter())
        self._on_news()

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
                self._follow(self.recorder.take(thread, choice))
                if thread == MAIN and choice.token == self.interpreter.vocabulary.control.sync:
                    return  # it goes on behind the join, in a task of its own
        finally:
            await stream.put_down()

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

    def _feed(self, thread: int, token: int, position: int) -> None:
        self.contexts[thread].append(token)
        self.steps[thread] += 1
        self.trace.fed.append(FedToken(self.steps[thread], thread, token, position))

    def _feed_again(self, ids: Sequence[int], position: int) -> None:
        self.contexts[MAIN] += ids
        self.steps[MAIN] = step = max(self.steps.values()) + 1
        self.trace.rewritten_tokens += len(ids)
        self.trace.fed += [FedToken(step, MAIN, token, position + n) for n, token in enumerate(ids)]


@dataclass
class ThreadStream:
    """What one thread writes with: the request that is under way for it, if there is one."""

    writer: AnswerWriter
    thread: int
    _tokens: AsyncGenerator[int] | None = None

    async def choose(self) -> SampledToken:
        refused: set[int] = set()
        while not (allowed := self._allowed()).forced:
            token = await (self._instead(allowed, refused) if refused else self._next())
            allowed = self._allowed()  # others have written meanwhile
            if allowed.forced:
                break
            if allowed.admits(token):
                return SampledToken(token, intervened=bool(refused))
            if token in refused:
                about = f"the server insists on the token {token}"
                raise RemoteError(f"{about}, which `logit_bias` forbids")
            refused.add(token)
            await self.put_down()
        assert allowed.only is not None, "a limit leaves a choice of ids"
        return SampledToken(int(allowed.only[0]), intervened=False)

    async def put_down(self) -> None:
        if self._tokens is not None:
            tokens, self._tokens = self._tokens, None
            await tokens.aclose()

    async def _next(self) -> int:
        for _ in range(2):
            if self._tokens is None:
                most = self.writer.interpreter.budget.most_tokens(self.thread)
                self._tokens = self._ask(most, self._lasting_bans())
            token = await anext(self._tokens, None)
            if token is not None:
                return token
            self._tokens = None  # it has come to its length
        raise RemoteError("the server ended a reply before its first token")

    async def _instead(self, allowed: Constraint, refused: Collection[int]) -> int:
        self.writer.lease.sent.corrections += 1
        asked = self._ask(1, self._bias(allowed, refused), tries=len(refused))
        async with aclosing(asked) as tokens:
            if found := [token async for token in tokens]:
                return found[0]
        raise RemoteError("the server ended a reply before its first token")

    def _allowed(self) -> Constraint:
        return self.writer.interpreter.constraint(self.thread)

    def _ask(self, most: int, bias: dict[int, float], *, tries: int = 0) -> AsyncGenerator[int]:
        """Ask for tokens. The seed is of this very request, so that servers repeat themselves."""
        writer, vocabulary = self.writer, self.writer.interpreter.vocabulary
        service, context = writer.pool.service, writer.contexts[self.thread]
        control, sampler = vocabulary.control, writer.sampler
        index = writer.recorder.chosen.get(self.thread, 0)
        key = (sampler.params.seed, sampler.request, self.thread, index, tries)
        noise = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        end = control.sync if self.thread == MAIN else control.async_close
        all_bias = {**sampler.params.logit_bias, **bias}
        asked = Completion(
            prompt=tuple(context),
            max_tokens=max(1, min(most, service.max_positions - len(context))),
            stops=(end, *sorted(vocabulary.eos_ids)),
            end=vocabulary.end,
            bias={token: by for token, by in all_bias.items() if token < service.vocabulary_size},
            sampling=sampler.params,
            seed=int(noise >> 1),
            params=guided_params(writer.interpreter, self.thread),
        )
        return writer.pool.stream(writer.lease, asked)

    def _bias(self, allowed: Constraint, refused: Collection[int]) -> dict[int, float]:
        """Return a bias under which nothing of `refused` comes, and little that is forbidden.

        Where that is too much for a request, what is forbidden anywhere is left out.
        """
        bans = dict.fromkeys(refused, BAN)
        if (only := allowed.alternatives) is not None:
            return dict.fromkeys(only.tolist(), -BAN) | bans
        own = len(self.writer.sampler.params.logit_bias)
        left_out = max(0, len(allowed.banned) + len(refused) + own - MAX_BIASES)
        return dict.fromkeys(allowed.banned[left_out:].tolist(), BAN) | bans

    def _lasting_bans(self) -> dict[int, float]:
        """Forbid what the thread may never write, whatever the others do."""
        interpreter = self.writer.interpreter
        control = interpreter.vocabulary.control
        may_come = {control.async_close} if self.thread != MAIN else set()
        if self.thread == MAIN and interpreter.rules.parallel:
            may_come = {control.promise_open, control.sync, *control.promise_close.values()}
        return dict.fromkeys(control.ids - may_come, BAN)
