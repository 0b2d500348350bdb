"""How likely a careful reader is to take a candidate as a chunk, from a few facts about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from pasta_decoding.data.annotate.candidates import Candidate, Unit
from pasta_decoding.data.annotate.sequence import is_sequence
from pasta_decoding.data.annotate.structure import LEANS_BACK, parts_by_layout

TYPICAL_WORDS = 30


@dataclass(frozen=True, slots=True)
class Facts:
    """What the odds of a candidate depend on; yes and no are 1 and 0.

    always:     1.
    structured: `structure` would take it, too, if the response were no sequence.
    whole_line: it is made of whole lines.
    words:      its words / 30.
    length:     ln(its words / 30), squared.
    opening:    it begins the response.
    closing:    it ends the response.
    leaning:    it begins as if it went on from the text before it; plus 1 if the unit behind it,
                which it leaves out, does.
    sequential: the response is one thread by nature.
    dependence: nats a token that its beginning costs more when its siblings are hidden.
    """

    always: float
    structured: float
    whole_line: float
    words: float
    length: float
    opening: float
    closing: float
    leaning: float
    sequential: float
    dependence: float


READERS = Facts(
    always=-1.3,
    structured=1.93,
    whole_line=0.51,
    words=0.78,
    length=-1.34,
    opening=-1.85,
    closing=-0.71,
    leaning=-0.58,
    sequential=-2.67,
    dependence=0.0,
)
"""Log-odds for each fact, fitted together on three quarters of the annotated responses."""


def log_odds(facts: Facts, weights: Facts) -> float:
    """Return the sum of the facts, weighted."""
    return sum(getattr(facts, one.name) * getattr(weights, one.name) for one in fields(Facts))


def find_facts(
    text: str,
    units: Sequence[Unit],
    candidates: Sequence[Candidate],
    dependence: Mapping[int, float],
) -> Iterator[Facts]:
    """Yield the facts of each candidate; `dependence` has those units that were read alone."""
    structured = {(part.start, part.end) for part in parts_by_layout(text)}
    sequential = is_sequence(text)
    leans = [LEANS_BACK.match(text, unit.start) is not None for unit in units]
    for one in candidates:
        first, last = units[one.first], units[one.last]
        words = sum(unit.words for unit in units[one.first : one.last + 1])
        yield Facts(
            always=1,
            structured=(first.start, last.end) in structured,
            whole_line=first.opens and last.closes,
            words=words / TYPICAL_WORDS,
            length=math.log(words / TYPICAL_WORDS) ** 2,
            opening=one.first == 0,
            closing=one.last == len(units) - 1,
            leaning=leans[one.first] + (not last.closes and leans[one.last + 1]),
            sequential=sequential,
            dependence=dependence.get(one.first, 0.0),
        )
