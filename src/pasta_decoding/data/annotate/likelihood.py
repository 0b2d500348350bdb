"""Annotate a plain response by what a model pays for hiding its parts from each other.

No other model is needed, and none that knows the language: the base model reads each response
three times, in the project's own layouts.

1. In reading order: what each token costs with all earlier text in view.
2. With its units side by side, the first tokens of each: how much a unit depends on the ones before
   it. From this, and from a few plain facts about a candidate (`Prior`), follows how likely it is
   that a careful reader would take it; the candidates that promise most are taken.
3. As annotated: what hiding really costs. A chunk that costs more than `max_nats` a token goes back
   to the main thread, and a sync goes before main text that loses more than `sync_nats` a token.
   Where there is room, several topics are tried before, and the one is taken under which a chunk
   begins most likely.

Altogether at most three times the tokens of the plain response go through the model, prompts not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import islice, pairwise

from torch import Tensor

from pasta_decoding.data.annotate.base import Annotated
from pasta_decoding.data.annotate.candidates import Candidate, Unit, find_candidates, find_units
from pasta_decoding.data.annotate.lattice import choose, probabilities
from pasta_decoding.data.annotate.reading import (
    Laid,
    Piece,
    Reader,
    Thread,
    cut,
    lay_pieces,
    piece_nats,
)
from pasta_decoding.data.annotate.sequence import is_sequence
from pasta_decoding.data.annotate.structure import LEANS_BACK, find_parts
from pasta_decoding.data.annotate.topics import Part, first_new, is_topic, topic_choices
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, show, valid_tokens

LENGTHS = 3  # responses' tokens that may go through the model for each response
HEAD_TOKENS = 10  # of a unit or chunk, by which its dependence and its topics are judged
TYPICAL_WORDS = 30  # of a chunk


@dataclass(frozen=True, slots=True)
class Prior:
    """Log-odds that a careful reader takes a candidate, summed over what holds for it.

    Fitted on three quarters of the annotated responses (data/gold), all together.

    base:        in any case.
    structured:  `structure` takes it, too.
    whole_line:  it is made of whole lines.
    words:       for each twenty words.
    length:      for the square of ln(its words / 30).
    opening:     it begins the response.
    closing:     it ends the response.
    leaning:     it begins as if it went on from the text before; and again if the unit behind it,
                 which it leaves out, does so.
    sequential:  the response is one thread by nature.
    dependence:  for each nat a token that its beginning costs more when its siblings are hidden.
    """

    base: float = -1.3
    structured: float = 1.93
    whole_line: float = 0.51
    words: float = 0.52
    length: float = -1.34
    opening: float = -1.85
    closing: float = -0.71
    leaning: float = -0.58
    sequential: float = -2.67
    dependence: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What is accepted.

    max_nats:    a token, that hiding a chunk's siblings may cost at most.
    sync_nats:   a token, that main text must lose without the chunks for a sync before it.
    probability: of a candidate, at which taking it is even; about half of the F1 that is reached.
    """

    max_nats: float = 1.0
    sync_nats: float = 0.5
    probability: float = 0.35


Reading = Generator[Sequence[Laid], Sequence[dict[int, list[float]]], Tree]
"""One response being annotated: it asks for layouts to be read, and is sent each one's nats."""
