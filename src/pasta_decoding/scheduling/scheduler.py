"""The step scheduler: it owns an engine and advances the threads of all answers together.

Continuous batching: requests come and go between any two steps. A step is one forward pass of the
threads that its policy chooses and of some prompt tokens, few enough that a long prompt holds
nobody up. What an answer says depends neither on who else is there nor on when its threads write,
up to rounding: how many rows a pass has may move a logit's last bits, and with them a near-tie.

Shapes: F rows, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.engines.base import Engine, KeepsLogits
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.scheduling.admission import (
    LEAST_QUOTA,
    PrefixCache,
    check_request,
    has_room,
    quota_of,
)
from pasta_decoding.scheduling.generation import Generation, ThreadFeed
from pasta_decoding.scheduling.policy import SchedulingPolicy, share_out


@dataclass(frozen=True, slots=True)
class Activity:
    """What a scheduler or a worker does at a moment.

    running:      answers being written.
    live_threads: their threads that write or wait for their turn.
    slots:        of the cache, used by answers; 0 where servers have the cache, as the next two.
    kept_slots:   of the cache, with prefixes of ended answers until the room is needed.
    max_slots:    of the whole cache.
    """

    running: int = 0
    live_threads: int = 0
    slots: int = 0
    kept_slots: int = 0
    max_slots: int = 0


@dataclass(eq=False)
class Scheduler:
    """Answers any number of requests at once over one engine. Not for several threads.

    joining:  how answers join their chunks; see `Interpreter`.
    max_requests: how many requests are let in at a time; None: as many as there is room for.
    policy: which threads write in a step, and how much of prompts and rewrites it feeds.
    prefix_caching: whether requests reuse common prefixes, also those of ended answers.
    """

    engine: Engine
    vocabulary: Vocabulary
    scheme: Scheme
    _: KW_ONLY
    joining: Joining = Joining.kv
    max_requests: int | None = None
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    prefix_caching: bool = False
    clock: Callable[[], float] = time.perf_counter
    _generations: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prefix_cache = PrefixCache(self.engine)

    @property
    def busy(self) -> bool:
        return any(not generation.is_over for generation in self._generations)

    @property
    def activity(self) -> Activity:
        running, kept_slots = self._running(), self._prefix_cache.slots
        decoding = [one.interpreter for one in running if not one.unfed]
        return Activity(
            running=len(running),
            live_threads=sum(len(interpreter.writing) for interpreter in decoding),
            slots=self.engine.slots_in_use - kept_slots,
            kept_slots=kept_slots,
            max_slots=self.engine.max_slots or 0,
        )

    def check(self, request: Request) -> None:
        """Raises PastaError if it could not be answered even alone. Any thread may call."""
        check_request(request, self.engine, self.joining)

    def add(self, request: Request) -> Generation:
        """Queue a request; return what will have its answer. Raises as `check` does."""
        self.check(request)
        prompt_tokens, most = len(request.prompt), self.engine.max_positions
        interpreter = Interpreter(
            self.vocabulary, self.scheme, request.rules, prompt_tokens, most, self.joining
        )
        generation = Generation(request, self.engine, interpreter, self.clock())
        self._generations.append(generation)
        return generation

    def step(self) -> int:
        """Advance threads by one token, and prompts by what their budget allows; return how many.

        Whatever is raised in a forward pass, by the engine or in choosing, ends all requests in
        that pass, since their slots cannot be trusted: everything of theirs is freed, their
        `result` raises the error, and so does this call. The others can be stepped on. What is
        raised elsewhere belongs to none, and would come again for ever: it ends all that run.
        """
        running = self._admit()
        try:
            rows = self._take_threads(running)
            self._forward(rows, self._take_prompts(running, len(rows)))
        except BaseException as error:
            for one in running if all(one.error is None for one in running) else ():
                one.fail(error)
            raise
        self._conclude_finished()
        return len(rows)

    def cancel(self, generation: Generation) -> None:
        """End a request at once and free all that it holds; its answer is what there was."""
        if not generation.is_over:
            generation.cut_off()
            generation.conclude(self.clock())

    def close(self) -> None:
        for generation in self._generations:
            self.cancel(generation)
        self._prefix_cache.close()

    def _admit(self) -> list[Generation]:
        """Open requests, as long as there is room; return those that run. Both oldest first."""
        running = self._running()
        for one in self._generations:
            if one.opened_s is not None or one.is_over:
                continue
            if self.max_requests is not None and len(running) >= self.max_requests:
                break
            beside = [other.resources for other in running]
            if running and not has_room(self.engine, sum(beside, one.resources)):
                break
            one.quota = quota_of(one.request, self.engine, sum(beside, one.resources))
            self._prefix_cache.make_room(sum(beside, one.resources))
            if not self._open(one, alone=not running):
                break
            running.append(one)
        return running

    def _open(self, generation: Generation, *, alone: bool) -> bool:
        """Return whether the engine had the memory for it now; it may need that in one piece.

        Kept prefixes go first, then what is beyond the least quota.
        """
        while True:
            try:
                generation.open(self.clock())
                return True
            except PastaError as error:
                if self._prefix_cache.drop_oldest():
                    continue
                if generation.quota == LEAST_QUOTA:
                    if not alone:
                        return False  # the others will give theirs back
                    generation.fail(error)
                    raise
                generation.quota = LEAST_QUOTA
            except BaseException as error:
                generation.fail(error)
                raise

    def _take_threads(self, running: Sequence[Generation]) -> list[ThreadFeed]:
        live = [one for one in running if not one.unfed and one.pending]
        chosen = self.policy.choose([one.runnable() for one in live])
        return [row for one, threads in zip(live, chosen, strict=True) for row in one.take(threads)]

    def _take_prompts(self, running: Sequence[Generation], width: int) -> list[ThreadFeed]:
        prompts = [one for one in running if one.unfed]
        tokens = self.policy.prompt_tokens(width, self.engine.batch_tokens)
        if tokens and self.prefix_caching:
            prompts = self._prefix_cache.begin(prompts, running)
        shares = share_out([len(one.unfed) for one in prompts], tokens)
        return [one.take_prompt(n) for one, n in zip(prompts, shares, strict=True) if n]

    def _forward(self, rows: Sequence[ThreadFeed], prompts: Sequence[ThreadFeed]) -> None:
        if not (rows or prompts):
            return
        began_s = self.clock()
        try:
            self._compute([*rows, *prompts])
        except BaseException as error:
            for row in (*rows, *prompts):
                row.generation.fail(error)
            raise
        now_s = self.clock()
        seconds = now_s - began_s
        self.policy.learn(len(rows), seconds, sum(len(row.feed.ids) for row in prompts))
        for generation in dict.fromkeys([row.generation for row in rows]):
            generation.end_step(now_s, seconds)
        for row in prompts:
            row.generation.end_prompt(now_s, seconds)

    def _compute(self, rows: Sequence[ThreadFeed]) -> None:
        """Feed `rows`; the thread of each that wants logits chooses its next token."""
        feeds = [row.feed for row in rows]
        wanting = [row for row in rows if row.feed.wants_logits]
        if not (isinstance(self.engine, KeepsLogits) and self.engine.keeps_logits):
            for row, logits_V in zip(wanting, self.engine.step(feeds), strict=True):
                row.generation.choose(row.thread, logits_V)
            return
        from pasta_decoding.scheduling.device_sampler import sampled_rows

        kept_FV = self.engine.step_kept(feeds)
        params = [row.generation.row_params(row.thread) for row in wanting]
        tokens = sampled_rows(kept_FV, params) if params else []
        for row, one, token, kept_V in zip(wanting, params, tokens, kept_FV, strict=True):
            # A row is fetched only if its token may not stand there.
            row.generation.accept(row.thread, one, token, partial(kept_V.numpy, force=True))

    def _conclude_finished(self) -> None:
        """End answers that are finished or out of time, queued ones included."""
        now_s = self.clock()
        for generation in self._generations:
            if generation.is_over:
                continue
            limit = generation.request.rules.max_seconds
            if limit is not None and now_s - generation.added_s >= limit:
                generation.cut_off()
            if generation.interpreter.finished:
                if self.prefix_caching and (prefix := generation.release_prefix()):
                    self._prefix_cache.keep(prefix)
                generation.conclude(now_s)
        self._generations = [one for one in self._generations if not one.is_over]

    def _running(self) -> list[Generation]:
        return [one for one in self._generations if one.opened_s is not None and not one.is_over]
