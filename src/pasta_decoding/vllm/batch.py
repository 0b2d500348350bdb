"""The guided requests of a vLLM batch, and the tokens that each may write next.

vLLM has two model runners. The first one moves requests between rows of the batch: `GuidedRows`
follows them. With the second one each request stays in its slot: `GuidedSlots`.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.guided import XARG, GuidedParams, GuideKind, ThreadGrammar, read_params
from pasta_decoding.answer.request import GREEDY_BELOW
from pasta_decoding.answer.vocabulary import IdArray, Vocabulary, vocabulary_of
from pasta_decoding.lang.control import is_reserved

UNKNOWN = -1
"""Stands in a request's output for a token that has not come back from the accelerator."""


@dataclass
class ServedModel:
    """The tokenizer of the model that is served, with the control tokens of the last request.

    size: the number of logits.
    """

    tokenizer: Any
    size: int
    _vocabulary: Vocabulary | None = None

    def has(self, guide: GuidedParams) -> bool:
        """Is there all that `guide` names, and are its control tokens reserved for such use?"""
        if max(guide.ids) >= min(self.size, len(self.tokenizer)):
            return False
        names = map(self.tokenizer.convert_ids_to_tokens, sorted(guide.control.ids))
        return all(name is not None and is_reserved(name) for name in names)

    def vocabulary(self, guide: GuidedParams) -> Vocabulary:
        """Return the vocabulary as `guide`, of which all is there, binds it."""
        control, ends, end = guide.control, frozenset(guide.ends), guide.ends[0]
        known = self._vocabulary
        if known is None:  # reading the tokenizer takes a second, and depends on nobody who asks
            known = vocabulary_of(self.tokenizer, control, self.size, ends, end)
        elif (known.control, known.eos_ids, known.end) != (control, ends, end):
            known = replace(known, control=control, eos_ids=ends, end=end)
        self._vocabulary = known
        return known

    @cached_property
    def end(self) -> int:
        """The token that ends what the served model writes; the first one if it has none."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        return end if isinstance(end, int) and end < self.size else 0


@dataclass(eq=False)
class GuidedRequest:
    """What one request obeys.

    output: what was written: vLLM's own list, to which it appends, or that of a slot.
    temperature: of its sampling.
    """

    guide: GuidedParams
    served: ServedModel
    output: list[int]
    temperature: float
    _last: int = UNKNOWN

    def __post_init__(self) -> None:
        self._known = self.served.has(self.guide)
        self._begin()

    def constraint(self) -> Constraint | None:
        """Return what may come next; None where nobody can tell, since a token is not there yet.

        Where the vocabulary is another, its end is all that may come.
        """
        if self.guide.kind is GuideKind.check:
            return Constraint.force([self._verdict()])
        if not self._known:
            return Constraint.force([self.served.end])
        seen = self._seen
        if seen and (len(self.output) < seen or self.output[seen - 1] != self._last):
            self._begin()  # its end was left out or replaced; nothing before that ever is
        new = self.output[self._seen :]
        if UNKNOWN in new:
            return None
        for token in new:
            self._thread.on_token(token)
            self._last = token
        self._seen += len(new)
        return self._thread.constraint()

    def _begin(self) -> None:
        self._seen = 0
        if self._known and self.guide.kind is not GuideKind.check:
            self._thread = ThreadGrammar(self.served.vocabulary(self.guide), self.guide)

    def _verdict(self) -> int:
        well, seen, unseen, foreign = self.guide.verdicts
        if max(self.guide.verdicts) >= self.served.size:
            return self.served.end
        if not self.output:
            return well if self._known else foreign
        return seen if self.output[0] == well else unseen


def guided_params_of(params: Any) -> GuidedParams | None:
    """Return the params among a request's arguments; None if there are none. Raises PastaError."""
    found = (params.extra_args or {}).get(XARG)
    return None if found is None else read_params(found)


@dataclass(eq=False)
class GuidedRows:
    """Requests by their row in the batch, as the first runner tells of changes."""

    served: ServedModel
    _rows: dict[int, GuidedRequest] = field(default_factory=dict)

    def update(self, change: Any) -> None:
        """Follow a `BatchUpdate`: first who left, then who came, then who moved."""
        if change is None:
            return
        for row in change.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output in change.added:
            self._rows.pop(row, None)
            if (guide := guided_params_of(params)) is not None:
                self._rows[row] = GuidedRequest(guide, self.served, output, params.temperature)
        for one, other, direction in change.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction.name == "SWAP":
                self._rows[one] = second

    def apply(self, logits_RV: Tensor) -> Tensor:
        found = [(row, one.constraint(), one.temperature) for row, one in self._rows.items()]
        restrict(logits_RV, found)
        return logits_RV


@dataclass(eq=False)
class GuidedSlots:
    """Requests by the slot that each keeps, as the second runner has them.

    states: the runner's own record of what every slot has read and written.
    """

    served: ServedModel
    states: Any
    _slots: dict[int, GuidedRequest] = field(default_factory=dict)

    def add(self, slot: int, params: Any) -> bool:
        """Let a request into a slot, after whoever had it; is it guided?"""
        self._slots.pop(slot, None)
        if (guide := guided_params_of(params)) is not None:
            self._slots[slot] = GuidedRequest(guide, self.served, [], params.temperature)
        return guide is not None

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
            self._follow(slot, one.output, token, place)
            found.append((row, one.constraint(), one.temperature))
        restrict(logits_RV, found)
        return logits_RV

    def _follow(self, slot: int, output: list[int], token: int, place: int) -> None:
        """Bring a slot's output up to the token at `place` of its sequence, counted from 0."""
        prompt_tokens = int(self.states.prompt_len.np[slot])
        wanted = max(0, place + 1 - prompt_tokens)
        if wanted > len(output) + 1:  # it was preempted, and is new in its slot
            ids = self.states.all_token_ids.gpu
            output[:] = ids[slot, prompt_tokens : prompt_tokens + wanted].tolist()
        elif wanted > 0:
            output[wanted - 1 :] = [token]  # what was drafted may have been refused


def restrict(logits_RV: Tensor, rows: Sequence[tuple[int, Constraint | None, float]]) -> None:
    """Change `logits_RV` in place, so that what is drawn from it is what may stand there.

    rows: which one, what may stand there if that is known, and the temperature of the draw.
    """
    banned: list[tuple[int, IdArray]] = []
    for row, allowed, temperature in rows:
        if allowed is None:
            continue
        for token, by in allowed.bias.items():
            logits_RV[row, token] += by
        if allowed.only is not None:
            _keep(logits_RV[row], allowed.only)
        elif allowed.instead is not None:
            _lift(logits_RV[row], allowed.banned, allowed.instead, temperature)
        if len(allowed.banned):
            banned.append((row, allowed.banned))
    if banned:
        which = np.repeat([row for row, _ in banned], [len(ids) for _, ids in banned])
        ids = np.concatenate([ids for _, ids in banned])
        places = (_tensor(which, logits_RV), _tensor(ids, logits_RV))
        logits_RV.index_put_(places, logits_RV.new_tensor(-torch.inf))


def _keep(logits_V: Tensor, only: Any) -> None:
    ids = _tensor(only, logits_V)
    kept = logits_V[ids]
    logits_V.fill_(-torch.inf)
    logits_V[ids] = kept


def _lift(logits_V: Tensor, banned: Any, instead: Any, temperature: float) -> None:
    """Give `instead` all of the probability that `banned` has; it loses that elsewhere.

    So who wants a banned token chooses among these, and who wants another one has it.
    """
    lost, ids = logits_V[_tensor(banned, logits_V)], _tensor(instead, logits_V)
    if temperature < GREEDY_BELOW:
        logits_V[ids] += torch.relu(lost.max() - logits_V[ids].max())
        return
    ratio = (lost / temperature).logsumexp(0) - (logits_V[ids] / temperature).logsumexp(0)
    logits_V[ids] += temperature * torch.nn.functional.softplus(ratio)


def _tensor(ids: Any, beside: Tensor) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device=beside.device)
