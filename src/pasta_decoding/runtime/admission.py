"""Which requests are decoded at the same time: what they may come to, and what there is room for.

First come, first served: a request enters when all that it may come to fits beside all that those
already in may come to. So nobody is overtaken, and nobody runs out of room half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.pool import Limits
from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.request import Request

DEFAULT_MAX_PAIRS = 2**22
"""Ten answers to short prompts under the default rules."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a request may come to, or several together.

    cells:    tokens of prompt and answer.
    branches: one a live thread, and one that keeps the finished chunks until main joins them.
    """

    cells: int
    branches: int

    def __add__(self, other: Load) -> Load:
        return Load(self.cells + other.cells, self.branches + other.branches)

    @property
    def pairs(self) -> int:
        """Cells times branches: what attention computes a step over a cache that all share."""
        return self.cells * self.branches


def load_of(request: Request) -> Load:
    """Return the most that `request` may come to."""
    rules = request.rules
    chunk_branches = min(rules.max_chunks, rules.max_threads) if rules.parallel else 0
    return Load(len(request.prompt) + rules.max_tokens, 1 + chunk_branches)


@dataclass(frozen=True, slots=True)
class Admission:
    """The policy. Cells and branches are what the engine has; `max_pairs` keeps steps short.

    Whoever does not fit the engine even alone is refused; `max_pairs` (None: no limit) only keeps
    requests apart.
    """

    engine: Engine
    max_pairs: int | None

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could not be answered even alone."""
        if not request.prompt:
            raise PastaError("the prompt is empty", hint="Give at least one token of prompt.")
        self._check_tokens(request, self.engine.max_positions, "the model's", "positions")
        self._check_tokens(request, self.engine.max_cells, "the engine's", "cells")
        branches, most = load_of(request).branches, self.engine.max_branches
        if not _within(branches, most):
            raise PastaError(
                f"an answer of up to {branches} branches does not fit the engine's {most}",
                hint="Allow fewer threads or fewer chunks.",
            )
        limits = Limits(self.engine.vocabulary_size, self.engine.max_positions)
        limits.check(request.prompt, range(len(request.prompt)))

    def admits(self, request: Request, beside: Sequence[Request]) -> bool:
        """Is there room for `request`, which passed `check`, `beside` those already in?"""
        together = sum(map(load_of, beside), load_of(request))
        return not beside or (
            _within(together.cells, self.engine.max_cells)
            and _within(together.branches, self.engine.max_branches)
            and _within(together.pairs, self.max_pairs)
        )

    def _check_tokens(self, request: Request, most: int | None, whose: str, what: str) -> None:
        if not _within(load_of(request).cells, most):
            raise PastaError(
                f"a prompt of {len(request.prompt)} tokens and an answer of up to "
                f"{request.rules.max_tokens} do not fit {whose} {most} {what}",
                hint="Use a shorter prompt, or allow fewer tokens for the answer.",
            )


def _within(number: int, most: int | None) -> bool:
    return most is None or number <= most
