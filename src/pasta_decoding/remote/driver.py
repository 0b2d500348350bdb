"""The async driver: an answer written by plain requests for completions.

Each thread's context is a plain sequence of ids, so chunks are joined as text. A promise opens a
request for its chunk, and main's request goes on. SYNC ends main's request; when the chunks are
done, a new request begins with everything in reading order. The prefix caches of the servers save
computing the shared contexts again.

A server with Pasta's logits processor obeys the `GuidedParams` of a request. For other servers,
`logit_bias` forbids the tokens that are forbidden during all of a request. A token that is
forbidden only at its place ends the request; then a correction, which is a request for a single
token with the bias of that place, brings the next best token.
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
    """Writes one answer with servers, as `Generation` does with an engine. Call `run` once.

    task:     the task of `run`; its creator sets it.
    on_news:  called when `drain` has more to return.
    contexts: for each thread, the ids that its next token follows, from the prompt on.
    steps:    for each thread, the step of its last token, as the layout counts steps.
    """

    def __init__(
        self,
        request: Request,
        vocabulary: Vocabulary,
        pool: ReplicaPool,
        on_news: Callable[[], object],
    ) -> None:
        self.request = request
        self.sampler = request.sampler
        self.pool = pool
        self._on_news = on_news
        self.interpreter = Interpreter(
            vocabulary,
            SHARED_MAX,
            request.rules,
            prompt_tokens=len(request.prompt),
            max_positions=pool.service.max_positions,
            joining=Joining.text,
        )
        self.task: asyncio.Task[Answer]
        self.contexts = {MAIN: list(request.prompt)}
        self.steps = {MAIN: 0}
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
        """Write the answer. Cancelling this ends all of its requests.

        Raises RemoteError if a thread fails in spite of retries; the other threads are cancelled.
        """
        queue_s = time.perf_counter() - self.recorder.began_s
        max_seconds = self.request.rules.max_seconds
        timer = None
        if max_seconds is not None:
            timer = asyncio.get_running_loop().call_later(max_seconds - queue_s, self.cut_off)
        try:
            with self.pool.lease() as self.lease:
                self.trace.server_usage = self.lease.usage
                async with asyncio.TaskGroup() as self._group:
                    self._start(MAIN)
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            raise error from error.__cause__
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
        """Cancel the tasks of threads that have ended, apart from the task that runs now."""
        for thread in self._tasks.keys() - set(self.interpreter.writing_threads):
            task = self._tasks.pop(thread)
            if task is not asyncio.current_task():
                task.cancel()

    async def _write(self, thread: int) -> None:
        """Let `thread` write until it ends; let main write until its SYNC."""
        sync = self.interpreter.vocabulary.control.sync
        stream = ThreadStream(self, thread)
        try:
            while self.interpreter.writes(thread):
                choice = await stream.choose()
                self._follow(self.recorder.take(thread, choice))
                if thread == MAIN and choice.token == sync:
                    return  # `_apply` starts another task for main behind the join
        finally:
            await stream.close_request()

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
                case CloseChunk(thread, _, awaits_join) if not awaits_join:
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
        step = max(self.steps.values()) + 1
        self.steps[MAIN] = step
        self.trace.rewritten_tokens += len(ids)
        for offset, token in enumerate(ids):
            self.trace.fed.append(FedToken(step, MAIN, token, position + offset))


@dataclass
class ThreadStream:
    """The source of one thread's tokens: requests, one after the other.

    _tokens: the stream of the request under way, if any.
    """

    writer: AnswerWriter
    thread: int
    _tokens: AsyncGenerator[int] | None = None

    async def choose(self) -> SampledToken:
        """Return the next token that the thread may write."""
        refused: set[int] = set()
        while not (allowed := self._allowed()).forced:
            if refused:
                token = await self._corrected(allowed, refused)
            else:
                token = await self._next()
            allowed = self._allowed()  # other threads may have written in the meantime
            if allowed.forced:
                break
            if allowed.admits(token):
                return SampledToken(token, intervened=bool(refused))
            if token in refused:
                message = f"the server insists on the token {token}"
                raise RemoteError(f"{message}, which `logit_bias` forbids")
            refused.add(token)
            await self.close_request()
        assert allowed.only is not None, "a limit leaves a choice of ids"
        return SampledToken(int(allowed.only[0]), intervened=False)

    async def close_request(self) -> None:
        if self._tokens is not None:
            tokens = self._tokens
            self._tokens = None
            await tokens.aclose()

    async def _next(self) -> int:
        """Return the next token of the request under way, or else of a new one."""
        for _ in range(2):
            if self._tokens is None:
                max_tokens = self.writer.interpreter.budget.remaining_tokens(self.thread)
                self._tokens = self._ask(max_tokens, self._lasting_bans())
            token = await anext(self._tokens, None)
            if token is not None:
                return token
            self._tokens = None  # the request has come to its `max_tokens`
        raise RemoteError("the server ended a reply before its first token")

    async def _corrected(self, allowed: Constraint, refused: Collection[int]) -> int:
        """Return the token of a correction: a request for one token that is not in `refused`."""
        self.writer.lease.usage.corrections += 1
        tokens = self._ask(1, self._bias(allowed, refused), tries=len(refused))
        async with aclosing(tokens):
            ids = [token async for token in tokens]
        if not ids:
            raise RemoteError("the server ended a reply before its first token")
        return ids[0]

    def _allowed(self) -> Constraint:
        return self.writer.interpreter.constraint(self.thread)

    def _ask(
        self, max_tokens: int, bias: dict[int, float], *, tries: int = 0
    ) -> AsyncGenerator[int]:
        """Return the tokens of a new request, which is sent when the first one is awaited.

        The seed depends on the sampler's seed and the place in the answer alone, so that a server
        can repeat its answers.
        """
        writer = self.writer
        vocabulary = writer.interpreter.vocabulary
        control = vocabulary.control
        sampler = writer.sampler
        service = writer.pool.service
        context = writer.contexts[self.thread]
        index = writer.recorder.token_counts.get(self.thread, 0)
        key = (sampler.params.seed, sampler.request, self.thread, index, tries)
        noise = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        end = control.sync if self.thread == MAIN else control.async_close
        all_bias = {**sampler.params.logit_bias, **bias}
        completion = Completion(
            prompt=tuple(context),
            max_tokens=max(1, min(max_tokens, service.max_positions - len(context))),
            stops=(end, *sorted(vocabulary.eos_ids)),
            end=vocabulary.end,
            bias={
                token: value for token, value in all_bias.items() if token < service.vocabulary_size
            },
            sampling=sampler.params,
            seed=int(noise >> 1),
            params=guided_params(writer.interpreter, self.thread),
        )
        return writer.pool.stream(writer.lease, completion)

    def _bias(self, allowed: Constraint, refused: Collection[int]) -> dict[int, float]:
        """Return the bias of a correction: it bans `refused`, and tokens that are not `allowed`.

        If that is more than a request may bias, it leaves out the tokens that are banned in most
        places, which the model seldom wants.
        """
        bans = dict.fromkeys(refused, BAN)
        alternatives = allowed.alternatives
        if alternatives is not None:
            return dict.fromkeys(alternatives.tolist(), -BAN) | bans
        configured = len(self.writer.sampler.params.logit_bias)
        excess = max(0, len(allowed.banned) + len(refused) + configured - MAX_BIASES)
        return dict.fromkeys(allowed.banned[excess:].tolist(), BAN) | bans

    def _lasting_bans(self) -> dict[int, float]:
        """Ban the control tokens that the thread may never write."""
        interpreter = self.writer.interpreter
        control = interpreter.vocabulary.control
        if self.thread != MAIN:
            permitted = {control.async_close}
        elif interpreter.rules.parallel:
            permitted = {control.promise_open, control.sync, *control.promise_close.values()}
        else:
            permitted = set()
        return dict.fromkeys(control.ids - permitted, BAN)
