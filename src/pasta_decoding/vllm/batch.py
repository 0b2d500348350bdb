"""The requests of a batch that obey a brief, wherever vLLM moves them.

vLLM has two model runners, which hand requests to a processor in two ways: `Places` follows those
of the first, whose rows are moved about, and `Slots` those of the second, whose stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.runtime.briefs import XARG, Brief, read_brief
from pasta_decoding.vllm.masking import Mask
from pasta_decoding.vllm.writing import Served, Writing


def brief_of(params: Any) -> Brief | None:
    """Return the brief among a request's arguments; None if it has none. Raises PastaError."""
    found = (params.extra_args or {}).get(XARG)
    return None if found is None else read_brief(found)


class Places:
    """Requests by their row in the batch, as the first runner tells of changes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._rows: dict[int, Writing] = {}
        self._mask = Mask()

    def update(self, change: Any) -> None:
        """Follow a `BatchUpdate`: first who left, then who came, then who moved."""
        if change is None:
            return
        for row in change.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output in change.added:
            self._rows.pop(row, None)
            if (brief := brief_of(params)) is not None:
                self._rows[row] = Writing(brief, self._served, output, params.temperature)
        for one, other, direction in change.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction.name == "SWAP":
                self._rows[one] = second

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Hold every row to its rules."""
        found = [(row, one.constraint(), one.temperature) for row, one in self._rows.items()]
        self._mask.restrict(
            logits_RV, [(row, may, heat) for row, may, heat in found if may is not None]
        )
        return logits_RV


class Slots:
    """Requests by the slot that each keeps, as the second runner has them.

    states: the runner's own record of what every slot has read and written.
    """

    def __init__(self, served: Served, states: Any) -> None:
        self._served = served
        self._states = states
        self._slots: dict[int, Writing] = {}
        self._outputs: dict[int, list[int]] = {}
        self._mask = Mask()

    def add(self, slot: int, params: Any) -> bool:
        """Let a request into a slot, after whoever had it; does it obey a brief?"""
        self._slots.pop(slot, None)
        brief = brief_of(params)
        if brief is None:
            return False
        self._outputs[slot] = []
        self._slots[slot] = Writing(brief, self._served, self._outputs[slot], params.temperature)
        return True

    def apply(self, logits_RV: Tensor, context: Any) -> Tensor:
        """Hold every row to its rules. What was just written is fetched from the accelerator."""
        if not self._slots.keys() & set(context.idx_mapping_np.tolist()):
            return logits_RV
        rows = (context.expanded_idx_mapping, context.input_ids, context.pos)
        fetched = torch.stack([one.to(torch.int64) for one in rows], 1).tolist()
        found = []
        for row, (slot, token, place) in enumerate(fetched):
            if (one := self._slots.get(slot)) is None:
                continue
            self._follow(slot, token, place)
            found.append((row, one.constraint(), one.temperature))
        self._mask.restrict(
            logits_RV, [(row, may, heat) for row, may, heat in found if may is not None]
        )
        return logits_RV

    def _follow(self, slot: int, token: int, place: int) -> None:
        """Bring a slot's output up to the token at `place` of its sequence, counted from 0."""
        prompt_tokens = int(self._states.prompt_len.np[slot])
        output, wanted = self._outputs[slot], max(0, place + 1 - prompt_tokens)
        if wanted > len(output) + 1:  # it was preempted, and is new in its slot
            output[:] = self._written(slot, prompt_tokens, wanted)
        elif wanted > 0:
            output[wanted - 1 :] = [token]  # what was drafted may have been refused

    def _written(self, slot: int, prompt_tokens: int, tokens: int) -> Sequence[int]:
        """Return what was written there before."""
        ids: list[int] = self._states.all_token_ids.gpu[
            slot, prompt_tokens : prompt_tokens + tokens
        ].tolist()
        return ids
