"""Which ids a thread may write next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pasta_decoding.runtime.vocabulary import Ids


@dataclass(frozen=True, slots=True)
class Constraint:
    """Which ids a thread may write next: those not in `banned`, or only those in `only`.

    banned: what is forbidden just here stands behind what is in many places.
    instead: where the model wants a banned token, it chooses among these; None: among the rest.
    forced: the choice is not the model's (a limit ended something), so it is no intervention.
    bias: added to the logits of some ids first, as if the model had wanted it so.
    """

    banned: Ids
    only: Ids | None = None
    instead: Ids | None = None
    forced: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)

    def admits(self, token: int) -> bool:
        """May `token` stand here?"""
        if self.only is not None:
            return bool(np.any(self.only == token))
        return not np.any(self.banned == token)

    @classmethod
    def force(cls, ids: Sequence[int]) -> Constraint:
        """Allow only `ids`: a limit leaves no other choice."""
        return cls(NOTHING, only=np.array(ids), forced=True)


NOTHING: Ids = np.array([], dtype=np.int64)
