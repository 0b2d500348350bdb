"""The requests of one thread of an answer: its tokens one by one, whatever they take.

A server chooses tokens without asking the interpreter. One with Pasta's logits processor gets
`GuidedParams` with the request, and obeys. With others `logit_bias` forbids what a whole request
may not write, and a token that may not stand where it came is taken back: its request ends, and one
of a single token, with the right bias, brings the next best. Both give what constraints would.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.remote.stream import BAN, MAX_BIASES, Completion, RemoteError
from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.guided import guided_params
from pasta_decoding.runtime.sampler import Choice

if TYPE_CHECKING:
    from pasta_decoding.remote.driver import AnswerWriter


class ThreadStream:
    """What one thread writes with: the request that is under way for it, if there is one."""

    def __init__(self, writer: AnswerWriter, thread: int) -> None:
        self._writer = writer
        self._thread = thread
        self._tokens: AsyncGenerator[int] | None = None

    async def choose(self) -> Choice:
        """Return the next token of the thread, one that it may write now."""
        refused: set[int] = set()
        while not (allowed := self._allowed()).forced:
            token = await (self._instead(allowed, refused) if refused else self._next())
            allowed = self._allowed()  # others have written meanwhile
            if allowed.forced:
                break
            if allowed.admits(token):
                return Choice(token, intervened=bool(refused))
            if token in refused:
                raise RemoteError(
                    f"the server insists on the token {token}, which `logit_bias` forbids"
                )
            refused.add(token)
            await self.put_down()
        assert allowed.only is not None, "a limit leaves a choice of ids"
        return Choice(int(allowed.only[0]), intervened=False)

    async def put_down(self) -> None:
        """End the request that is under way."""
        if self._tokens is not None:
            tokens, self._tokens = self._tokens, None
            await tokens.aclose()

    async def _next(self) -> int:
        """Return the next token of the request under way, or of a new one."""
        for _ in range(2):
            if self._tokens is None:
                most = self._writer.interpreter.budget.most_tokens(self._thread)
                self._tokens = self._ask(most, self._lasting_bans())
            token = await anext(self._tokens, None)
            if token is not None:
                return token
            self._tokens = None  # it has come to its length
        raise RemoteError("the server ended a reply before its first token")

    async def _instead(self, allowed: Constraint, refused: Collection[int]) -> int:
        """Return what the model would write in place of `refused`."""
        self._writer.lease.sent.corrections += 1
        asked = self._ask(1, self._bias(allowed, refused), tries=len(refused))
        async with aclosing(asked) as tokens:
            if found := [token async for token in tokens]:
                return found[0]
        raise RemoteError("the server ended a reply before its first token")

    def _allowed(self) -> Constraint:
        return self._writer.interpreter.constraint(self._thread)

    def _ask(self, most: int, bias: dict[int, float], *, tries: int = 0) -> AsyncGenerator[int]:
        """Ask for tokens. The seed is of this very request, so that servers repeat themselves."""
        writer, vocabulary = self._writer, self._writer.interpreter.vocabulary
        service, context = writer.pool.service, writer.contexts[self._thread]
        control, sampler = vocabulary.control, writer.sampler
        index = writer.recorder.chosen.get(self._thread, 0)
        noise = np.random.SeedSequence(
            (sampler.params.seed, sampler.request, self._thread, index, tries)
        )
        all_bias = {**sampler.params.logit_bias, **bias}
        asked = Completion(
            prompt=tuple(context),
            max_tokens=max(1, min(most, service.max_positions - len(context))),
            stops=(
                control.sync if self._thread == MAIN else control.async_close,
                *sorted(vocabulary.eos_ids),
            ),
            end=vocabulary.end,
            bias={token: by for token, by in all_bias.items() if token < service.vocabulary_size},
            sampling=sampler.params,
            seed=int(noise.generate_state(1, np.uint64)[0] >> 1),
            params=guided_params(writer.interpreter, self._thread),
        )
        return writer.pool.stream(writer.lease, asked)

    def _bias(self, allowed: Constraint, refused: Collection[int]) -> dict[int, float]:
        """Return a bias under which nothing of `refused` comes, and little that is forbidden.

        Where that is too much for a request, what is forbidden anywhere is left out.
        """
        bans = dict.fromkeys(refused, BAN)
        only = allowed.instead if allowed.only is None else allowed.only
        if only is not None:
            return dict.fromkeys(only.tolist(), -BAN) | bans
        own = len(self._writer.sampler.params.logit_bias)
        left_out = max(0, len(allowed.banned) + len(refused) + own - MAX_BIASES)
        return dict.fromkeys(allowed.banned[left_out:].tolist(), BAN) | bans

    def _lasting_bans(self) -> dict[int, float]:
        """Forbid what the thread may never write, whatever the others do."""
        interpreter = self._writer.interpreter
        control = interpreter.vocabulary.control
        may_come = {control.async_close} if self._thread != MAIN else set()
        if self._thread == MAIN and interpreter.rules.parallel:
            may_come = {control.promise_open, control.sync, *control.promise_close.values()}
        return dict.fromkeys(control.ids - may_come, BAN)
