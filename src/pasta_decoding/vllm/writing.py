"""One request of a batch: where its thread stands, and what it may write next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pasta_decoding.models.control_tokens import is_reserved
from pasta_decoding.runtime.allowed import Constraint
from pasta_decoding.runtime.briefs import Brief, Kind
from pasta_decoding.runtime.lone_thread import LoneThread
from pasta_decoding.runtime.vocabulary import Vocabulary, vocabulary_of

UNKNOWN = -1
"""Stands in a request's output for a token that has not come back from the accelerator."""
_KEPT = 4


@dataclass
class Served:
    """The tokenizer of the model that is served, with the control tokens of whoever asks.

    size: the number of logits.
    """

    tokenizer: Any
    size: int
    _bound: dict[Hashable, Vocabulary] = field(default_factory=dict)

    def has(self, brief: Brief) -> bool:
        """Is there all that `brief` names, and are its control tokens reserved for such use?"""
        if max(brief.ids) >= min(self.size, len(self.tokenizer)):
            return False
        names = map(self.tokenizer.convert_ids_to_tokens, sorted(brief.control.ids))
        return all(name is not None and is_reserved(name) for name in names)

    def vocabulary(self, brief: Brief) -> Vocabulary:
        """Return the vocabulary as `brief`, of which all is there, binds it."""
        control = brief.control
        single = (control.promise_open, control.async_open, control.async_close, control.sync)
        key = (single, tuple(control.promise_close.items()), brief.ends)
        if key not in self._bound:
            while len(self._bound) >= _KEPT:
                del self._bound[next(iter(self._bound))]
            ends = frozenset(brief.ends)
            self._bound[key] = replace(
                self._read(brief), control=control, eos_ids=ends, end=brief.ends[0]
            )
        return self._bound[key]

    @cached_property
    def end(self) -> int:
        """The token that ends what the served model writes; the first one if it has none."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        return end if isinstance(end, int) and end < self.size else 0

    def _read(self, brief: Brief) -> Vocabulary:
        """Read the tokenizer once: that takes a second, and depends on nobody who asks."""
        if not hasattr(self, "_plain"):
            ends = (frozenset(brief.ends), brief.ends[0])
            self._plain = vocabulary_of(self.tokenizer, brief.control, self.size, *ends)
        return self._plain


class Writing:
    """What one request obeys. `output` is vLLM's own list, to which it appends what was written.

    temperature: of its sampling.
    """

    _seen: int
    _last: int
    _thread: LoneThread

    def __init__(
        self, brief: Brief, served: Served, output: Sequence[int], temperature: float
    ) -> None:
        self.temperature = temperature
        self.output = output
        self._brief = brief
        self._served = served
        self._known = served.has(brief)
        self._begin()

    def constraint(self) -> Constraint | None:
        """Return what may come next; None where nobody can tell, since a token is not there yet.

        Where the vocabulary is another, its end is all that may come.
        """
        if self._brief.kind is Kind.check:
            return Constraint.force([self._verdict()])
        if not self._known:
            return Constraint.force([self._served.end])
        if self._was_taken_back():
            self._begin()
        new = self.output[self._seen :]
        if UNKNOWN in new:
            return None
        for token in new:
            self._thread.on_token(token)
            self._last = token
        self._seen += len(new)
        return self._thread.constraint()

    def _was_taken_back(self) -> bool:
        """Has the end of what was heard been left out or replaced? Nothing before it ever is."""
        seen = self._seen
        return len(self.output) < seen or (seen > 0 and self.output[seen - 1] != self._last)

    def _begin(self) -> None:
        self._seen, self._last = 0, UNKNOWN
        if self._known and self._brief.kind is not Kind.check:
            self._thread = LoneThread(self._served.vocabulary(self._brief), self._brief)

    def _verdict(self) -> int:
        well, seen, unseen, foreign = self._brief.verdicts
        if max(self._brief.verdicts) >= self._served.size:
            return self._served.end
        if not self.output:
            return well if self._known else foreign
        return seen if self.output[0] == well else unseen
