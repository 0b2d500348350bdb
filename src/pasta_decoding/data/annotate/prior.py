"""How likely a careful reader is to take a candidate as a chunk, from a few facts about it.

Plain facts come from layout and wording alone. Three more come from a reading head (head.py), which
some base models have: what their hidden states say about each unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from pasta_decoding.data.annotate.candidates import Candidate, Unit
from pasta_decoding.data.annotate.sequence import is_sequence
from pasta_decoding.data.annotate.structure import CLOSING, LABELS, LEANS_BACK, parts_by_layout

TYPICAL_WORDS = 30  # of a chunk,
TYPICAL_RESPONSE = 150  # and of a response

_POINTS_BACK = re.compile(
    r"[\W_]*(?:it|its|they|their|them|he|she|his|her|him|this|these|those|that|such|both|one)\b",
    re.I,
)
_CREATIVE = re.compile(
    r"\b(?:story|poem|song|lyrics|script|screenplay|dialogue|letter|email|essay|speech|scene|chapter"
    r"|novel|joke|haiku|rap|monologue|continue|rewrite|translate|summari[sz]e|paraphrase|edit)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the odds of a candidate depend on; yes and no are 1 and 0.

    always:     1.
    structured: `structure` would take it, too, if the response were no sequence.
    whole_line: it is one line or several, whole.
    lines:      it is several.
    words:      its words / 30.
    length:     ln(its words / 30), squared.
    response:   ln(words of the response / 150).
    opening:    it begins the response.
    second:     it begins with the second unit.
    closing:    it ends the response.
    concluding: it begins as conclusions and remarks do.
    leading:    it ends with a colon.
    labelled:   it begins with a title of its own.
    leaning:    it begins as if it went on from the text before it; plus 1 if the unit behind it,
                which it leaves out, does.
    pointing:   that unit is in its line and begins with a pronoun.
    sequential: the response is one thread by nature.
    creative:   the instruction asks for a piece of writing.
    begins:     log-odds that its first unit begins a chunk rather than being main text,
    goes_on:    sum of those that its further units go on with one,
    ends:       and those that the unit behind it goes on with one. Without a head the three are 0.
    """

    always: float
    structured: float
    whole_line: float
    lines: float
    words: float
    length: float
    response: float
    opening: float
    second: float
    closing: float
    concluding: float
    leading: float
    labelled: float
    leaning: float
    pointing: float
    sequential: float
    creative: float
    begins: float = 0.0
    goes_on: float = 0.0
    ends: float = 0.0


NAMES = tuple(one.name for one in fields(Facts))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reading head says of one unit: log-probabilities that sum up to 1.

    main: it is main text. first: it begins a chunk. further: it goes on with one.
    """

    main: float
    first: float
    further: float


def log_odds(facts: Facts, weights: Facts) -> float:
    """Return the sum of the facts, weighted."""
    return sum(getattr(facts, name) * getattr(weights, name) for name in NAMES)


def find_facts(
    instruction: str,
    text: str,
    units: Sequence[Unit],
    candidates: Sequence[Candidate],
    seen: Sequence[Seen] | None,
) -> Iterator[Facts]:
    """Yield the facts of each candidate; `seen`: what a head says of each unit, if there is one."""
    structured = {(part.start, part.end) for part in parts_by_layout(text)}
    sequential, creative = is_sequence(text), _CREATIVE.search(instruction) is not None
    size = math.log(sum(unit.words for unit in units) / TYPICAL_RESPONSE) if candidates else 0.0
    for one in candidates:
        first, last = units[one.first], units[one.last]
        behind = units[one.last + 1] if one.last + 1 < len(units) else None
        words = sum(unit.words for unit in units[one.first : one.last + 1])
        begins, goes_on, ends = _reading(one, seen) if seen else (0.0, 0.0, 0.0)
        yield Facts(
            always=1,
            structured=(first.start, last.end) in structured,
            whole_line=first.opens and last.closes,
            lines=first.line != last.line,
            words=words / TYPICAL_WORDS,
            length=math.log(words / TYPICAL_WORDS) ** 2,
            response=size,
            opening=one.first == 0,
            second=one.first == 1,
            closing=behind is None,
            concluding=_begins(CLOSING, text, first),
            leading=text[: last.end].rstrip("*_ ").endswith(":"),
            labelled=any(_begins(label, text, first) for label in LABELS),
            leaning=_begins(LEANS_BACK, text, first)
            + (behind is not None and not last.closes and _begins(LEANS_BACK, text, behind)),
            pointing=behind is not None and not last.closes and _begins(_POINTS_BACK, text, behind),
            sequential=sequential,
            creative=creative,
            begins=begins,
            goes_on=goes_on,
            ends=ends,
        )


def _begins(pattern: re.Pattern[str], text: str, unit: Unit) -> bool:
    return pattern.match(text, unit.start) is not None


def _reading(one: Candidate, seen: Sequence[Seen]) -> tuple[float, float, float]:
    first = seen[one.first]
    begins = first.first - first.main
    goes_on = sum(unit.further - unit.main for unit in seen[one.first + 1 : one.last + 1])
    if one.last + 1 == len(seen):
        return begins, goes_on, 0.0
    behind = seen[one.last + 1].further
    return begins, goes_on, behind - math.log(-math.expm1(min(behind, -1e-9)))


READERS = Facts(
    always=-0.46,
    structured=0.74,
    whole_line=1.33,
    lines=-3.0,
    words=1.48,
    length=-1.65,
    response=-2.01,
    opening=-3.61,
    second=-0.72,
    closing=-1.34,
    concluding=-1.22,
    leading=-3.49,
    labelled=1.27,
    leaning=-0.82,
    pointing=-0.83,
    sequential=-2.18,
    creative=-0.94,
)
"""For a model without a head: fitted by train/head.py to what a careful reader made of the rows of
data/annotated_clean.jsonl.gz that are not held out."""
