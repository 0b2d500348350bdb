"""What an engine is: many branches decoded over one shared cache.

Shapes: F feeds of a step that want logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.float32]

Branch = NewType("Branch", int)
"""The name of a path through the cache. Opaque, hashable, never given out twice by an engine."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to a branch in one step.

    branches:     the branch that writes; then branches forked off it that still see exactly what
                  it sees. They receive the same tokens: the same slots, computed once.
    ids:          one or more token ids.
    positions:    one position id a token. They need not be new: branches that run side by side
                  overlap. Whether they may skip is the engine's `free_positions`.
    wants_logits: whether `step` returns a row, the one after the last id.
    """

    branches: tuple[Branch, ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    wants_logits: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take: token ids and positions lie below the first two.

    max_slots, max_branches: what all requests together may take; None: any number.
    """

    vocabulary_size: int
    max_positions: int
    max_slots: int | None = None
    max_branches: int | None = None

    def check(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Refuse ids and positions that the model does not have."""
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            bad = next(id_ for id_ in ids if not 0 <= id_ < self.vocabulary_size)
            raise PastaError(
                f"token id {bad} is outside the model's vocabulary of {self.vocabulary_size}"
            )
        if max(positions) >= self.max_positions:
            raise PastaError(
                f"position {max(positions)} is past the model's last, {self.max_positions - 1}"
            )
        assert min(positions) >= 0, "positions are not negative"


class Engine(Protocol):
    """Decodes many branches over one shared cache; every token is computed exactly once.

    A branch is a path through the cache: it sees what its parent saw at the fork, then its own
    tokens, then those of the branches it joins. Siblings never see each other. Branches that
    descend from one `open` form a request; requests share nothing.

    A request for too much (tokens beyond the model, the room or the memory) raises `PastaError`
    before anything changes. Using a closed branch, or one of
    another request, is a bug and an assertion. One thread at a time may call.

    `tests/engines/test_contract.py` is this contract in full; an engine that passes it is a
    supported engine.
    """

    @property
    def name(self) -> str:
        """The engine and its number format, as results quote it: `torch bfloat16`."""

    @property
    def vocabulary_size(self) -> int:
        """How many logits a row has; token ids lie below it."""

    @property
    def max_positions(self) -> int:
        """Position ids lie below it."""

    @property
    def free_positions(self) -> bool:
        """Whether position ids may be any; else each is 1 + the largest that its branch sees."""

    @property
    def batch_tokens(self) -> int:
        """How many tokens a step should have at most: more at once are no cheaper."""

    @property
    def slots_in_use(self) -> int:
        """Tokens held for open requests; 0 with nothing open.

        A request gives all of its slots back at once, when its last branch closes.
        """

    @property
    def max_slots(self) -> int | None:
        """What the `reserved_tokens` of all open requests may sum up to; None: as memory allows.

        An engine may need a request's room in one piece, and then refuse one earlier.
        """

    @property
    def max_branches(self) -> int | None:
        """How many branches may be open, those of all requests together; None: any number."""

    def open(self, *, reserved_tokens: int) -> Branch:
        """Return the first branch of a new request. It sees nothing: feed it the prompt.

        `reserved_tokens` is how many tokens the request may be fed, prompt included, all branches
        together. Memory for all of them is taken here, so a request that was opened cannot run out
        of it. Raises PastaError if there is none now; nothing is held then.
        """

    def fork(self, parent: Branch) -> Branch:
        """Return a branch that sees exactly what `parent` sees now. No key is copied.

        Raises PastaError if all branches are in use.
        """

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        """Let `parent` see from now on all that `children` see, and close them.

        What was computed stays as it is (the children never saw each other), and their order
        does not matter.
        """

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        """Let `target`, of another request, begin with the first `tokens` tokens of `source`.

        Nothing is computed, and later changes to one request do not reach the other. The request of
        `target` is empty; that of `source` was fed `tokens` or more before its first fork. They
        count as fed to both.
        """

    def shrink(self, branch: Branch, tokens: int) -> None:
        """Keep of a request its first `tokens` tokens, fed before its first fork, and no more.

        `branch` is the last one that it has: all other slots and room are given back. From then on
        it can be copied from and closed, not fed.
        """

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """Append every feed's ids; return logits_FV, a row for each feed that wants one, in order.

        The feeds count as made one after the other: a token sees what its branch saw, the
        tokens of this step that an earlier feed gave to its branch, and its own feed up to
        itself. So a token fed to (main, child) and a second one fed to (child,) go in one step.
        Sampling is the caller's: constraints, seeds and replay live in one place. After any other
        error than `PastaError` the slots cannot be trusted: close the request.
        """

    def close(self, branch: Branch) -> None:
        """Release `branch`; others that see its tokens keep them.

        Closing twice is an assertion: it hides a leak.
        """


@runtime_checkable
class KeepsLogits(Protocol):
    """An engine that can leave logits where it computed them, for tokens to be drawn there.

    keeps_logits: whether that pays: moving logits costs more than sampling.
    """

    keeps_logits: bool

    def step_kept(self, feeds: Sequence[Feed]) -> Tensor:
        """Do as `step` of `Engine`, and return logits_FV, float32, on the engine's device."""
