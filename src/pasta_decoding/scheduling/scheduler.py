"""The step scheduler: it owns an engine and advances the threads of all answers together.

Continuous batching: requests come and go between any two steps. A step is one forward pass. It
feeds a token of each thread that the policy chooses, and some prompt tokens: few enough that a
long prompt does not delay the other answers.

The text of an answer depends neither on the other answers nor on the steps in which its threads
write. Rounding is the exception: the number of rows in a pass can change the last bits of a logit,
and so a near-tie.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.engines.base import Engine, KeepsLogits
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.scheduling.admission import (
    MIN_QUOTA,
    ResourceRequest,
    check_request,
    has_room,
    quota_of,
)
from pasta_decoding.scheduling.generation import Generation, ThreadFeed
from pasta_decoding.scheduling.policy import SchedulingPolicy, share_out
from pasta_decoding.scheduling.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activity:
    """What a scheduler or a worker does at a moment.

    running:      answers being written.
    live_threads: threads of these answers that have not ended.
    slots:        cache slots of running answers. This and the next two are 0 for remote servers.
    kept_slots:   cache slots of prefixes of ended answers; free for new requests.
    max_slots:    all slots of the cache; 0 if it has no limit.
    """

    running: int = 0
    live_threads: int = 0
    slots: int = 0
    kept_slots: int = 0
    max_slots: int = 0


@dataclass(eq=False)
class Scheduler:
    """Answers any number of requests at once over one engine. One thread at a time may call.

    joining:  how answers join their chunks; see `Interpreter`.
    max_requests: limit on running requests; None: only the engine's room limits them.
    policy: chooses the threads of a step, and its number of prompt tokens.
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
        running = self._running()
        interpreters = [generation.interpreter for generation in running if not generation.unfed]
        kept_slots = self._prefix_cache.slots
        return Activity(
            running=len(running),
            live_threads=sum(len(interpreter.writing_threads) for interpreter in interpreters),
            slots=self.engine.slots_in_use - kept_slots,
            kept_slots=kept_slots,
            max_slots=self.engine.max_slots or 0,
        )

    def check(self, request: Request) -> None:
        """Raise PastaError if the engine could never answer `request`. Any thread may call."""
        check_request(request, self.engine, self.joining)

    def add(self, request: Request) -> Generation:
        """Queue a request; the returned generation will have its answer. Raises as `check` does."""
        self.check(request)
        interpreter = Interpreter(
            self.vocabulary,
            self.scheme,
            request.rules,
            prompt_tokens=len(request.prompt),
            max_positions=self.engine.max_positions,
            joining=self.joining,
        )
        generation = Generation(request, self.engine, interpreter, self.clock())
        self._generations.append(generation)
        return generation

    def step(self) -> int:
        """Make one forward pass: each chosen thread advances by a token, prompts by several.

        Returns the number of threads that advanced.

        An exception in the pass, from the engine or from sampling, ends all requests of that pass,
        since their slots cannot be trusted. Their branches are closed; `result` and this call raise
        the exception. Other requests go on in the next step. An exception from anywhere else would
        come again in each step, so it ends all running requests.
        """
        running = self._admit()
        try:
            thread_feeds = self._take_threads(running)
            prompt_feeds = self._take_prompts(running, len(thread_feeds))
            self._forward(thread_feeds, prompt_feeds)
        except BaseException as error:
            failed_in_pass = any(generation.error is not None for generation in running)
            if not failed_in_pass:
                for generation in running:
                    generation.fail(error)
            raise
        self._conclude_finished()
        return len(thread_feeds)

    def cancel(self, generation: Generation) -> None:
        """End a request at once and free its resources. Its answer is the text up to now."""
        if not generation.is_over:
            generation.cut_off()
            generation.conclude(self.clock())

    def close(self) -> None:
        """Cancel all requests and empty the prefix cache. The engine stays open."""
        for generation in self._generations:
            self.cancel(generation)
        self._prefix_cache.close()

    def _running(self) -> list[Generation]:
        return [
            generation
            for generation in self._generations
            if generation.opened_s is not None and not generation.is_over
        ]

    # Admission

    def _admit(self) -> list[Generation]:
        """Open queued requests while there is room; return all that run. Both oldest first."""
        running = self._running()
        for generation in self._generations:
            is_queued = generation.opened_s is None and not generation.is_over
            if is_queued:
                if not self._try_open(generation, running):
                    break
                running.append(generation)
        return running

    def _try_open(self, generation: Generation, running: Sequence[Generation]) -> bool:
        """Open a queued request next to `running`, as wide as the room allows, if it fits."""
        if self.max_requests is not None and len(running) >= self.max_requests:
            return False
        needed = self._needed(generation, running)
        if running and not has_room(self.engine, needed):
            return False
        generation.quota = quota_of(generation.request, self.engine, needed)
        needed_with_quota = self._needed(generation, running)
        self._prefix_cache.make_room(needed_with_quota)
        return self._open(generation, is_alone=not running)

    def _needed(self, generation: Generation, running: Sequence[Generation]) -> ResourceRequest:
        running_resources = [other.resources for other in running]
        return sum(running_resources, generation.resources)

    def _open(self, generation: Generation, *, is_alone: bool) -> bool:
        """Open a request for which `has_room` is true. Return False if memory is short now.

        An engine may need the memory in one piece, and so refuse. Then the prefix cache gives up
        its prefixes, one at a time; then the request gives up its quota.
        """
        while True:
            try:
                generation.open(self.clock())
                return True
            except PastaError as error:
                if self._prefix_cache.drop_oldest():
                    continue
                if generation.quota != MIN_QUOTA:
                    generation.quota = MIN_QUOTA
                    continue
                if not is_alone:
                    return False  # the running answers will give their memory back
                generation.fail(error)
                raise
            except BaseException as error:
                generation.fail(error)
                raise

    # The forward pass

    def _take_threads(self, running: Sequence[Generation]) -> list[ThreadFeed]:
        decoding = [
            generation for generation in running if not generation.unfed and generation.pending
        ]
        runnable = [generation.runnable() for generation in decoding]
        thread_feeds: list[ThreadFeed] = []
        for generation, threads in zip(decoding, self.policy.choose(runnable), strict=True):
            thread_feeds += generation.take(threads)
        return thread_feeds

    def _take_prompts(self, running: Sequence[Generation], thread_count: int) -> list[ThreadFeed]:
        prefilling = [generation for generation in running if generation.unfed]
        tokens = self.policy.prompt_tokens(thread_count, self.engine.batch_tokens)
        if tokens and self.prefix_caching:
            prefilling = self._prefix_cache.begin(prefilling, running)
        shares = share_out([len(generation.unfed) for generation in prefilling], tokens)
        return [
            generation.take_prompt(share)
            for generation, share in zip(prefilling, shares, strict=True)
            if share
        ]

    def _forward(
        self, thread_feeds: Sequence[ThreadFeed], prompt_feeds: Sequence[ThreadFeed]
    ) -> None:
        """Make the pass, and record its time. An exception ends all requests in the pass."""
        all_feeds = [*thread_feeds, *prompt_feeds]
        if not all_feeds:
            return
        began_s = self.clock()
        try:
            self._compute(all_feeds)
        except BaseException as error:
            for thread_feed in all_feeds:
                thread_feed.generation.fail(error)
            raise
        now_s = self.clock()
        seconds = now_s - began_s
        prompt_tokens = sum(len(prompt_feed.feed.ids) for prompt_feed in prompt_feeds)
        self.policy.learn(len(thread_feeds), seconds, prompt_tokens)
        for generation in dict.fromkeys(thread_feed.generation for thread_feed in thread_feeds):
            generation.end_step(now_s, seconds)
        for prompt_feed in prompt_feeds:
            prompt_feed.generation.end_prompt(now_s, seconds)

    def _compute(self, all_feeds: Sequence[ThreadFeed]) -> None:
        """Feed the engine; each thread with logits chooses its next token, in order."""
        feeds = [thread_feed.feed for thread_feed in all_feeds]
        sampling = [thread_feed for thread_feed in all_feeds if thread_feed.feed.wants_logits]
        if isinstance(self.engine, KeepsLogits) and self.engine.keeps_logits:
            self._sample_on_device(sampling, self.engine.step_kept(feeds))
            return
        for thread_feed, logits_V in zip(sampling, self.engine.step(feeds), strict=True):
            thread_feed.generation.choose(thread_feed.thread, logits_V)

    def _sample_on_device(self, sampling: Sequence[ThreadFeed], logits_FV: Tensor) -> None:
        from pasta_decoding.scheduling.device_sampler import sample_tokens

        if not sampling:
            return
        rows = [thread_feed.generation.row_params(thread_feed.thread) for thread_feed in sampling]
        winners = sample_tokens(logits_FV, rows)
        for thread_feed, row, winner, logits_V in zip(
            sampling, rows, winners, logits_FV, strict=True
        ):
            # A row leaves the device only if the thread may not write the winner.
            fetch_logits = partial(logits_V.numpy, force=True)
            thread_feed.generation.accept(thread_feed.thread, row, winner, fetch_logits)

    # The end of an answer

    def _conclude_finished(self) -> None:
        """End answers that are finished or out of time, queued ones included."""
        now_s = self.clock()
        for generation in self._generations:
            if generation.is_over:
                continue
            max_seconds = generation.request.rules.max_seconds
            if max_seconds is not None and now_s - generation.added_s >= max_seconds:
                generation.cut_off()
            if generation.interpreter.finished:
                if self.prefix_caching:
                    self._prefix_cache.keep_prefix_of(generation)
                generation.conclude(now_s)
        self._generations = [
            generation for generation in self._generations if not generation.is_over
        ]
