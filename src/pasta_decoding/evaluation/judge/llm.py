"""A large language model behind an endpoint as a judge, asked about every pair in both orders."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pasta_decoding.data.endpoint import Chat, Endpoint, EndpointError, Message, Reply, connect
from pasta_decoding.data.lines import append_line, parse_lines

_TASK = """You compare two answers to the same instruction. The better one is more correct, more \
helpful, keeps to the instruction and is well written. Length is worth nothing by itself; \
repetition, made-up facts and text that breaks off are faults.

Instruction:
<instruction>
{prompt}
</instruction>

Answer A:
<answer>
{a}
</answer>

Answer B:
<answer>
{b}
</answer>

Which answer is better? Reply with one letter, A or B, and nothing else."""
_VERDICT = re.compile(r"\b([AB])\b")
_MAX_TOKENS = 8
_TOP_LOGPROBS = 20

Order = tuple[str, str, str]
"""A prompt, the answer that is shown first, and the other."""


class LlmJudge:
    """Asks an endpoint; every reply is kept in a file, and what is there is not asked again.

    failures: why there was no verdict, and how often; these are asked again next time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cache: Path,
        *,
        logprobs: bool = True,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._endpoint = endpoint
        self._logprobs = logprobs
        self._cache = cache
        self._tick = tick
        self._known = dict(
            parse_lines(
                cache,
                lambda line: (str(line["key"]), float(line["first"])),
                what="a verdict of this judge",
                hint="Choose another file for the verdicts.",
                resume=True,
            )
        )

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the mean preference of both orders; None unless both brought a verdict.

        Raises PastaError where no question can succeed: no server, a refused key, no such model.
        """
        orders = list(zip(prompts, a, b, strict=True))
        orders += [(p, y, x) for p, x, y in orders]
        distinct = list(dict.fromkeys(orders))
        for _ in range(len(orders) - len(distinct)):  # one question answers them all
            self._tick()
        asyncio.run(self._ask_all(distinct))
        known = [self._known.get(self._key(order)) for order in orders]
        forward, backward = known[: len(prompts)], known[len(prompts) :]
        return [
            None if one is None or other is None else (one + 1 - other) / 2
            for one, other in zip(forward, backward, strict=True)
        ]

    async def _ask_all(self, orders: Sequence[Order]) -> None:
        """Ask what is not known yet; the endpoint decides how much of it at the same time."""
        todo = [order for order in orders if self._key(order) not in self._known]
        for _ in range(len(orders) - len(todo)):
            self._tick()
        try:
            async with connect(self._endpoint) as chat, asyncio.TaskGroup() as group:
                for order in todo:
                    group.create_task(self._ask(chat, order))
        except ExceptionGroup as failed:  # what `except*` raises would be a group again
            fatal = [one for one in failed.exceptions if isinstance(one, EndpointError)]
            if not fatal:
                raise
            raise fatal[0] from None

    async def _ask(self, chat: Chat, order: Order) -> None:
        try:
            reply = await chat(
                _question(order),
                max_tokens=_MAX_TOKENS,
                top_logprobs=_TOP_LOGPROBS if self._logprobs else None,
            )
        except EndpointError as error:
            if error.fatal:
                raise
            self.failures[str(error)] += 1
        else:
            self._keep(order, reply)
        self._tick()

    def _keep(self, order: Order, reply: Reply) -> None:
        verdict = read_verdict(reply)
        if verdict is None:
            self.failures["a reply without a verdict"] += 1
            return
        key = self._key(order)
        self._known[key] = verdict
        append_line(self._cache, {"key": key, "first": verdict})

    def _key(self, order: Order) -> str:
        """Return what stands for a question in the file: another model is another question."""
        asked = json.dumps([self._endpoint.model, self._logprobs, _TASK, *order])
        return hashlib.sha256(asked.encode()).hexdigest()[:32]


def read_verdict(reply: Reply) -> float | None:
    """Return the probability that the first answer is better; None if the reply says neither.

    Where the endpoint tells the likeliest first tokens and most of these are A or B, it is the
    share of A among the two; else 1 or 0 for the one letter that the text names.
    """
    mass = {"A": 0.0, "B": 0.0}
    for token, logprob in (reply.top_logprobs or {}).items():
        if token.strip() in mass:
            mass[token.strip()] += math.exp(logprob)
    if (total := sum(mass.values())) > 0.5:
        return mass["A"] / total
    named = set(_VERDICT.findall(reply.text))
    return float(named == {"A"}) if len(named) == 1 else None


def _question(order: Order) -> list[Message]:
    prompt, a, b = order
    # Not str.format: the answers may hold braces.
    parts = {"{prompt}": prompt, "{a}": a, "{b}": b}
    text = re.sub("|".join(map(re.escape, parts)), lambda hole: parts[hole.group()], _TASK)
    return [{"role": "user", "content": text}]
