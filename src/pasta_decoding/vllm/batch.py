"""The guided requests of a vLLM batch, and the tokens that each may write next.

vLLM has two model runners. The first one moves requests between rows of the batch: `GuidedRows`
follows them. With the second one each request stays in its slot: `GuidedSlots`.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.guided import XARG, GuidedParams, GuideKind, ThreadGrammar, read_params
from pasta_decoding.answer.settings import GREEDY_BELOW
from pasta_decoding.answer.vocabulary import IdArray, Vocabulary, vocabulary_of
from pasta_decoding.lang.control import is_reserved

UNKNOWN = -1
"""Stands in a request's output for a token that has not come back from the accelerator."""


@dataclass
class ServedModel:
    """What this process knows of the model that vLLM serves.

    vocabulary_size: the number of its logits.
    _vocabulary: bound to the control tokens of the last request. A new one takes a second.
    """

    tokenizer: Any
    vocabulary_size: int
    _vocabulary: Vocabulary | None = None

    def has_tokens_of(self, guide: GuidedParams) -> bool:
        """Does the model have all ids of `guide`, and are its control tokens reserved ones?"""
        if max(guide.ids) >= min(self.vocabulary_size, len(self.tokenizer)):
            return False
        names = map(self.tokenizer.convert_ids_to_tokens, sorted(guide.control.ids))
        return all(name is not None and is_reserved(name) for name in names)

    def vocabulary(self, guide: GuidedParams) -> Vocabulary:
        """Return the vocabulary with the control tokens and the ends of `guide`.

        `has_tokens_of(guide)` must be true.
        """
        ends = frozenset(guide.ends)
        first_end = guide.ends[0]
        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(
                self.tokenizer, guide.control, self.vocabulary_size, ends, first_end
            )
        bound = (self._vocabulary.control, self._vocabulary.eos_ids, self._vocabulary.end)
        if bound != (guide.control, ends, first_end):
            self._vocabulary = replace(
                self._vocabulary, control=guide.control, eos_ids=ends, end=first_end
            )
        return self._vocabulary

    @cached_property
    def end(self) -> int:
        """The token with which the model ends a text; 0 if it has none."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        return end if isinstance(end, int) and end < self.vocabulary_size else 0


@dataclass(eq=False)
class GuidedRequest:
    """One request that obeys a guide.

    output: the ids written up to now. The owner of the list changes it: vLLM, or `GuidedSlots`.
    temperature: of its sampling.
    _read_tokens: how many tokens of `output` the thread's grammar has read; `_last_read` is the
                  last one of them.
    """

    guide: GuidedParams
    model: ServedModel
    output: list[int]
    temperature: float
    _last_read: int = UNKNOWN

    def __post_init__(self) -> None:
        self._has_tokens = self.model.has_tokens_of(self.guide)
        self._restart()

    def constraint(self) -> Constraint | None:
        """Return what may come next; None if that depends on an UNKNOWN token.

        If the model has not the tokens of the guide, only an end may come.
        """
        if self.guide.kind is GuideKind.check:
            return Constraint.force([self._verdict()])
        if not self._has_tokens:
            return Constraint.force([self.model.end])
        if self._was_rewritten():
            self._restart()
        new_tokens = self.output[self._read_tokens :]
        if UNKNOWN in new_tokens:
            return None
        for token in new_tokens:
            self._grammar.on_token(token)
            self._last_read = token
        self._read_tokens += len(new_tokens)
        return self._grammar.constraint()

    def _was_rewritten(self) -> bool:
        """Was the last token read removed or replaced? vLLM never changes the tokens before it."""
        if self._read_tokens == 0:
            return False
        if len(self.output) < self._read_tokens:
            return True
        return self.output[self._read_tokens - 1] != self._last_read

    def _restart(self) -> None:
        self._read_tokens = 0
        if self._has_tokens and self.guide.kind is not GuideKind.check:
            self._grammar = ThreadGrammar(self.model.vocabulary(self.guide), self.guide)

    def _verdict(self) -> int:
        """Return the token that answers a client's check of this server.

        The first token says whether the model has the guide's tokens, the second one whether this
        request was shown the first.
        """
        well, seen, unseen, foreign = self.guide.verdicts
        if max(self.guide.verdicts) >= self.model.vocabulary_size:
            return self.model.end
        if not self.output:
            return well if self._has_tokens else foreign
        return seen if self.output[0] == well else unseen


def guided_params_of(params: Any) -> GuidedParams | None:
    """Return the guide in vLLM's `SamplingParams`; None if there is none. Raises PastaError."""
    encoded = (params.extra_args or {}).get(XARG)
    return None if encoded is None else read_params(encoded)


@dataclass(eq=False)
class GuidedRows:
    """Guided requests by their row in the batch, for vLLM's first model runner."""

    model: ServedModel
    _requests: dict[int, GuidedRequest] = field(default_factory=dict)

    def update(self, change: Any) -> None:
        """Follow a `BatchUpdate`: first the removed requests, then the added, then the moved."""
        if change is None:
            return
        for row in change.removed:
            self._requests.pop(row, None)
        for row, params, _prompt, output in change.added:
            self._requests.pop(row, None)
            guide = guided_params_of(params)
            if guide is not None:
                self._requests[row] = GuidedRequest(guide, self.model, output, params.temperature)
        for source_row, target_row, direction in change.moved:
            self._move(source_row, target_row, swap=direction.name == "SWAP")

    def _move(self, source_row: int, target_row: int, *, swap: bool) -> None:
        """Move a request to another row. The request there comes back in a swap, else it ends."""
        moved = self._requests.pop(source_row, None)
        replaced = self._requests.pop(target_row, None)
        if moved is not None:
            self._requests[target_row] = moved
        if swap and replaced is not None:
            self._requests[source_row] = replaced

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Restrict `logits_RV` in place to the tokens that each guided row may write."""
        restrictions = [
            RowRestriction(row, request.constraint(), request.temperature)
            for row, request in self._requests.items()
        ]
        restrict(logits_RV, restrictions)
        return logits_RV


@dataclass(eq=False)
class GuidedSlots:
    """Guided requests by their slot, for vLLM's second model runner.

    states: the runner's own record of the tokens in each slot.
    """

    model: ServedModel
    states: Any
    _requests: dict[int, GuidedRequest] = field(default_factory=dict)

    def add(self, slot: int, params: Any) -> bool:
        """Put a new request into a slot, in the place of any other. Return whether it is guided."""
        self._requests.pop(slot, None)
        guide = guided_params_of(params)
        if guide is None:
            return False
        self._requests[slot] = GuidedRequest(guide, self.model, [], params.temperature)
        return True

    def apply(self, logits_RV: Tensor, context: Any) -> Tensor:
        """Restrict `logits_RV` in place to the tokens that each guided row may write.

        A slot has a row for its last token and one for each drafted token. Fetching the tokens
        makes the CPU wait for the accelerator, so batches without guided requests skip it.
        """
        if not self._requests.keys() & set(context.idx_mapping_np.tolist()):
            return logits_RV
        columns = (context.expanded_idx_mapping, context.input_ids, context.pos)
        table = torch.stack([column.to(torch.int64) for column in columns], 1).tolist()
        restrictions = []
        for row, (slot, token, position) in enumerate(table):
            request = self._requests.get(slot)
            if request is None:
                continue
            self._follow(slot, request.output, token, position)
            constraint = request.constraint()
            restrictions.append(RowRestriction(row, constraint, request.temperature))
        restrict(logits_RV, restrictions)
        return logits_RV

    def _follow(self, slot: int, output: list[int], token: int, position: int) -> None:
        """Bring the output of a slot up to `token`, which is at `position` of its sequence.

        Positions count from 0 over prompt and output.
        """
        prompt_tokens = int(self.states.prompt_len.np[slot])
        output_tokens = max(0, position + 1 - prompt_tokens)
        if output_tokens > len(output) + 1:  # the request was preempted, and is new in this slot
            ids = self.states.all_token_ids.gpu
            output[:] = ids[slot, prompt_tokens : prompt_tokens + output_tokens].tolist()
        elif output_tokens > 0:
            output[output_tokens - 1 :] = [token]  # drafted tokens may have been refused


class RowRestriction(NamedTuple):
    """What one row of the logits may write; `constraint` is None if it is not known."""

    row: int
    constraint: Constraint | None
    temperature: float


def restrict(logits_RV: Tensor, restrictions: Sequence[RowRestriction]) -> None:
    """Change `logits_RV` in place, so that vLLM samples only tokens that may stand there."""
    banned_rows: list[int] = []
    banned_ids: list[IdArray] = []
    for row, constraint, temperature in restrictions:
        if constraint is None:
            continue
        for token, bias in constraint.bias.items():
            logits_RV[row, token] += bias
        if constraint.only is not None:
            _allow_only(logits_RV[row], constraint.only)
        elif constraint.substitutes is not None:
            _lift(logits_RV[row], constraint.banned, constraint.substitutes, temperature)
        if len(constraint.banned):
            banned_rows.append(row)
            banned_ids.append(constraint.banned)
    if banned_rows:
        # One write for all rows: each is a call on the accelerator.
        rows = np.repeat(banned_rows, [len(ids) for ids in banned_ids])
        indices = (_tensor(rows, logits_RV), _tensor(np.concatenate(banned_ids), logits_RV))
        logits_RV.index_put_(indices, logits_RV.new_tensor(-torch.inf))


def _allow_only(logits_V: Tensor, allowed_ids: IdArray) -> None:
    ids = _tensor(allowed_ids, logits_V)
    allowed_logits = logits_V[ids]
    logits_V.fill_(-torch.inf)
    logits_V[ids] = allowed_logits


def _lift(logits_V: Tensor, banned: IdArray, instead: IdArray, temperature: float) -> None:
    """Add the probability of the `banned` tokens to the tokens `instead` of them.

    So the model's wish for a banned token becomes a choice among these; the probabilities of all
    other tokens stay as they are. The caller bans the banned ones.
    """
    banned_logits = logits_V[_tensor(banned, logits_V)]
    ids = _tensor(instead, logits_V)
    if temperature < GREEDY_BELOW:
        logits_V[ids] += torch.relu(banned_logits.max() - logits_V[ids].max())
        return
    banned_mass = (banned_logits / temperature).logsumexp(0)
    instead_mass = (logits_V[ids] / temperature).logsumexp(0)
    logits_V[ids] += temperature * torch.nn.functional.softplus(banned_mass - instead_mass)


def _tensor(ids: Any, reference: Tensor) -> Tensor:
    """Return `ids` as int64 on the device of `reference`."""
    return torch.as_tensor(ids, dtype=torch.int64, device=reference.device)
