"""The step scheduler: it owns an engine and advances the threads of all answers together.

Continuous batching: requests come and go between any two steps. A step is one forward pass of the
threads that its policy chooses and of some prompt tokens, few enough that a long prompt holds
nobody up. What an answer says depends neither on who else is there nor on when its threads write,
up to rounding: how many rows a pass has may move a logit's last bits, and with them a near-tie.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from pasta_decoding.engines.base import Engine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.runtime import forward
from pasta_decoding.runtime.admission import Admission, ResourceRequest, shared_prefix_len
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.generation import Generation, Row
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.policy import LEAST_QUOTA, CheapestStep, Runnable, SchedulingPolicy
from pasta_decoding.runtime.prefix_cache import Prefill, PrefillBudget
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.trace import Trace
from pasta_decoding.runtime.vocabulary import Vocabulary

__all__ = ["Request", "Scheduler"]


class Scheduler:
    """Answers any number of requests at once over one engine. Not for several threads.

    joining:  how answers join their chunks; see `Interpreter`.
    max_requests: how many requests are let in at a time; None: as many as there is room for.
    policy: who writes in which step; `CheapestStep` unless told otherwise.
    prefill_budget: how many prompt tokens a step takes, and of what text joins rewrite.
    prefix_caching: whether prompts share what they begin with alike, ended answers' prompts too.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        scheme: Scheme,
        *,
        joining: Joining = Joining.kv,
        max_requests: int | None = None,
        policy: SchedulingPolicy | None = None,
        prefill_budget: PrefillBudget | None = None,
        prefix_caching: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._scheme = scheme
        prefill_budget = PrefillBudget() if prefill_budget is None else prefill_budget
        self._prefill = Prefill(engine, prefill_budget, prefix_caching=prefix_caching)
        self._joining = joining
        self._admission = Admission(engine, joining)
        self._max_requests = max_requests
        self._policy = CheapestStep() if policy is None else policy
        self.last_width = 0
        self.delays: Counter[str] = Counter()
        self._clock = clock
        self._numbers = count()
        self._generations: dict[int, Generation] = {}

    @property
    def busy(self) -> bool:
        """Is any answer being written, or waiting to be?"""
        return any(not generation.is_over for generation in self._generations.values())

    @property
    def running(self) -> int:
        """How many requests are let in and not over."""
        return len(self._running())

    @property
    def live_threads(self) -> int:
        """How many threads are being written, those of all requests together, delayed ones too."""
        decoding = [one for one in self._running() if not one.unfed]
        return sum(len(generation.interpreter.writing) for generation in decoding)

    @property
    def kept_cells(self) -> int:
        """Cells that ended answers left for prompts that begin alike; who needs them gets them."""
        return self._prefill.cache.cells

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could not be answered even alone. Any thread may call."""
        self._admission.check(request)

    def add(self, request: Request) -> int:
        """Queue a request; return its number, under which it is known until `forget`.

        Raises PastaError if it could not be answered even alone; nothing is held then.
        """
        return self.add_together([request])[0]

    def add_together(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that are let in together; return their numbers.

        What their prompts begin with alike is fed once, and held once. Otherwise they are requests
        like any other. Raises PastaError if there could never be room for all of them.
        """
        for request in requests:
            self.check(request)
        demands = self._admission.resources_together(requests)
        self._admission.check_together(sum(demands[1:], demands[0]))
        now_s = self._clock()
        family = [self._generation(*one, now_s) for one in zip(requests, demands, strict=True)]
        shared_tokens = shared_prefix_len(requests)
        for one in family:
            one.family, one.shared_tokens = family, shared_tokens
        numbers = [next(self._numbers) for _ in family]
        self._generations |= zip(numbers, family, strict=True)
        return numbers

    def _generation(self, request: Request, demand: ResourceRequest, now_s: float) -> Generation:
        prompt_tokens = len(request.prompt)
        interpreter = Interpreter(
            self._vocabulary,
            self._scheme,
            request.rules,
            prompt_tokens,
            self._engine.max_positions,
            self._joining,
            request.stops,
        )
        return Generation(request, self._engine, interpreter, Trace(prompt_tokens), demand, now_s)

    def step(self) -> None:
        """Advance every live thread by one token, and prompts by what their budget allows.

        Whatever is raised in a forward pass, by the engine or in choosing, ends all requests in
        that pass, since their cells cannot be trusted: everything of theirs is freed, `result`
        raises the error for each of them, and so does this call. The others can be stepped on.
        """
        self._admit()
        ready = self._prefill.ready(self._running())
        rows = self._take_threads()
        self._forward(rows, self._prefill.rows(ready, len(rows)))
        self._settle()

    def drain_events(self, number: int) -> list[Event]:
        """Return the events of a request since the last call."""
        return self._generations[number].drain_events()

    def steps(self, number: int) -> int:
        """Return how many decode steps a request has had, its prefill not among them."""
        return len(self._generations[number].trace.steps)

    def result(self, number: int) -> Answer | None:
        """Return the finished answer; None while it waits or is being written.

        Raises the error that ended the request, if one did.
        """
        generation = self._generations[number]
        if generation.error is not None:
            raise generation.error
        return generation.answer

    def cancel(self, number: int) -> None:
        """End a request at once and free all that it holds; its result is what there was."""
        generation = self._generations[number]
        if not generation.is_over:
            generation.stop()
            generation.conclude(self._clock())

    def forget(self, number: int) -> None:
        """Cancel a request and drop its result. Whoever adds one forgets it in the end."""
        self.cancel(number)
        del self._generations[number]

    def close(self) -> None:
        """Cancel everything and free all that is held."""
        for number in self._generations:
            self.cancel(number)
        self._prefill.cache.close()

    def _admit(self) -> None:
        """Open requests in the order in which they came, as long as there is room."""
        running = self._running()
        for generation in self._generations.values():
            if generation.opened_s is not None or not generation.is_first:
                continue
            if self._max_requests is not None and len(running) >= self._max_requests:
                return
            first, *others = [one.needs for one in generation.family]
            beside = [one.demand for one in running]
            if not self._admission.admits(sum(others, first), beside):
                return
            self._allot(generation.family, sum([*others, *beside], first))
            together = [one.demand for one in (*running, *generation.family)]
            self._prefill.cache.make_room(sum(together[1:], together[0]))
            if not self._open(generation, alone=not running):
                return
            running += generation.family

    def _allot(self, family: Sequence[Generation], taken: ResourceRequest) -> None:
        """Give those that are let in what may make their steps wider."""
        for one in family:
            taken -= one.needs
            one.allot(self._admission.allot(one.request, taken + one.needs))
            taken += one.demand

    def _open(self, generation: Generation, *, alone: bool) -> bool:
        """Open a request; return whether the engine had the memory for it now."""
        try:
            self._open_somehow(generation)
        except BaseException as error:
            if isinstance(error, PastaError) and not alone:
                return False  # the others will give theirs back
            generation.fail(error)
            raise
        return True

    def _open_somehow(self, generation: Generation) -> None:
        """Open a request with what it was allotted, or with what it needs."""
        while True:
            try:
                generation.open(self._clock())
                return
            except PastaError:  # an engine may need a request's room in one piece
                if not self._prefill.cache.drop_oldest():
                    break
        for one in generation.family:
            one.allot(LEAST_QUOTA)
        generation.open(self._clock())

    def _take_threads(self) -> list[Row]:
        """Return what is fed of the threads whose turn it is: the last token of each."""
        live = [one for one in self._running() if not one.unfed and one.pending]
        runnable = [one.runnable() for one in live]
        chosen = self._policy.choose(runnable)
        rows = [row for one, threads in zip(live, chosen, strict=True) for row in one.take(threads)]
        self._note_delays(runnable, len(rows))
        return rows

    def _note_delays(self, runnable: Sequence[Runnable], width: int) -> None:
        """Count the threads that wait in this step, by reason."""
        self.last_width = width
        self.delays["width"] += sum(len(one.threads) for one in runnable) - width
        self.delays["room"] += sum(one.for_room for one in runnable)
        self.delays["threads"] += sum(one.for_thread for one in runnable)

    def _forward(self, rows: Sequence[Row], prompts: Sequence[Row]) -> None:
        """Make one forward pass, choose where logits come, and note what it took."""
        if not (rows or prompts):
            return
        cells = self._engine.slots_in_use
        seconds = self._pass([*rows, *prompts])
        self._prefill.budget.learn(len(rows), sum(len(row.feed.ids) for row in prompts), seconds)
        if not prompts:
            self._policy.learn(len(rows), seconds)
        for generation in {row.generation: None for row in rows}:
            generation.trace.end_step(cells, seconds)
        for row in prompts:
            row.generation.end_prompt(cells, seconds)

    def _pass(self, rows: Sequence[Row]) -> float:
        began_s = self._clock()
        try:
            forward.step(self._engine, rows)
        except BaseException as error:
            for generation in {row.generation for row in rows}:
                generation.fail(error)
            raise
        now_s = self._clock()
        for row in rows:
            row.generation.stamp(now_s)
        return now_s - began_s

    def _settle(self) -> None:
        """End what is finished, and what has no time left, in the queue too."""
        now_s = self._clock()
        for generation in self._generations.values():
            if generation.is_over:
                continue
            limit = generation.request.max_seconds
            if limit is not None and now_s - generation.added_s >= limit:
                generation.stop()
            if generation.interpreter.finished:
                self._prefill.keep(generation)
                generation.conclude(now_s)

    def _running(self) -> list[Generation]:
        """Return the requests that are let in and not over, oldest first."""
        return [
            one
            for one in self._generations.values()
            if one.opened_s is not None and not one.is_over
        ]
