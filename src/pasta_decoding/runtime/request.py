"""What is asked of the scheduler: one answer to be written."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.runtime.governor import Priority
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Chooser


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be written.

    priority:    how it stands to others that are written at the same time.
    stops:       strings of which the first one to be complete, in reading order, ends the answer.
    max_seconds: limit on the wall clock, time in the queue included; None means no limit.
    """

    prompt: tuple[int, ...]
    chooser: Chooser
    rules: Rules = field(default_factory=Rules)
    max_seconds: float | None = None
    priority: Priority = Priority.normal
    stops: tuple[str, ...] = ()
