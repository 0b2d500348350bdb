"""Answers that repeat a sentence or write an empty list, from which a model learns not to do so.

Greedy decoding of a small model that was finetuned briefly falls into loops: a sentence that stands
there twice is likelier a third time, and likelier still a fourth. Xu et al., "Learning to Break the
Loop" (NeurIPS 2022, DITTO), train against just that: a sentence of the training data is repeated by
hand, and each of its tokens is to be less likely than it was one repetition earlier.

It counts, too, where a list should stand ("1. 2. 3."), or writes marker below marker. Markers that
follow a marker are put behind a sentence by hand, and each of their tokens is to be less likely
than it is (unlikelihood training, Welleck et al. 2020).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pasta_decoding.lang.layout import Layout, Run, lay_out
from pasta_decoding.lang.positions import Scheme

_SENTENCE = re.compile(r"\s*[^.!?\n]+[.!?\n]*")
_MOST_REPEATED_TOKENS = 160
# The first marker of a list, and what stands behind it where its text should.
_LISTS = (
    (" 1.", " 2. 3. 4. 5. 6."),
    (" 1.", " 1. 2. 3. 4. 5."),
    ("\n1.", " 1. 2. 3. 4. 5."),
    ("\n1.", " \n2. \n3. \n4. "),
    ("\n- 1.", " 2. 3. 4. 5."),
    ("\n- 1.", " 1. 2. 3. 4."),
    ("\n- 1.", " \n- 2. \n- 3. "),
    ("\n-", " \n- \n- \n- "),
    ("\n-", " - - - - -"),
    ("\n-", "\n-\n-\n-\n"),
)


@dataclass(frozen=True, slots=True)
class LoopLayout(Layout):
    """A plain answer whose last `repeats` labels each stand there `period` labels earlier, too.

    With a period of 0 each is compared with itself: it is to be half as likely as it is.
    """

    period: int
    repeats: int

    @property
    def again(self) -> list[int | None]:
        """For each label, which label it repeats; None for those that are not to be unlearnt."""
        labels = sum(label is not None for label in self.label)
        first = labels - self.repeats
        return [None] * first + [at - self.period for at in range(first, labels)]


def sentences(text: str) -> list[str]:
    """Cut `text` behind full stops and line ends; nothing is lost between the pieces."""
    return _SENTENCE.findall(text)


def looped(
    prompt: Sequence[int],
    before: Sequence[int],
    sentence: tuple[int, ...],
    times: int,
    scheme: Scheme,
    *,
    async_close: int,
) -> LoopLayout:
    """Lay out an answer of the tokens `before`, and then `sentence` so many times.

    It has no end: what should follow is not known.
    """
    ids = (*before, *sentence * times)
    plain = lay_out(prompt, [Run(ids)], scheme, async_close=async_close, end=None)
    columns = {field.name: getattr(plain, field.name) for field in fields(Layout)}
    return LoopLayout(**columns, period=len(sentence), repeats=len(sentence) * (times - 1))


def empty_list(
    prompt: Sequence[int],
    before: Sequence[int],
    marker: Sequence[int],
    more: Sequence[int],
    scheme: Scheme,
    *,
    async_close: int,
) -> LoopLayout:
    """Lay out an answer of the tokens `before`, a `marker` of a list, and `more` of them.

    Nothing is learnt of the first marker, whose text could follow, and there is no end.
    """
    ids = (*before, *marker, *more)
    plain = lay_out(prompt, [Run(ids)], scheme, async_close=async_close, end=None)
    columns = {field.name: getattr(plain, field.name) for field in fields(Layout)}
    first = len(prompt) + len(before) - 1  # from here the marker is predicted
    columns["label"] = tuple(
        None if first <= at < first + len(marker) else label for at, label in enumerate(plain.label)
    )
    return LoopLayout(**columns, period=0, repeats=len(more))


def draw_list(
    encoded: Sequence[Sequence[int]],
    encode: Callable[[str], list[int]],
    max_tokens: int,
    draw: random.Random,
) -> tuple[tuple[int, ...], list[int], list[int]] | None:
    """Choose behind which of an answer's sentences an empty list stands, and how it looks.

    encoded:    token ids of each of its sentences.
    max_tokens: of the answer that comes of it.

    Return the tokens before it, its first marker's, and the others'; None where it does not fit.
    """
    at = draw.randrange(len(encoded)) + 1 if encoded else 0
    before = tuple(token for ids in encoded[:at] for token in ids)
    marker, more = map(encode, draw.choice(_LISTS))
    return (before, marker, more) if len(before) + len(marker) + len(more) <= max_tokens else None


def draw_loop(
    encoded: Sequence[Sequence[int]], max_tokens: int, draw: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Choose which of an answer's sentences is repeated, and how often.

    encoded:    token ids of each of its sentences.
    max_tokens: of the answer that comes of it.

    Return the tokens before it, its own, and the times; None where there is none or not two fit.
    """
    if not encoded:
        return None
    at = draw.randrange(len(encoded))
    before = tuple(token for ids in encoded[:at] for token in ids)
    sentence = tuple(encoded[at])
    room = min(max_tokens - len(before), _MOST_REPEATED_TOKENS)
    times = room // len(sentence) if sentence else 0
    return (before, sentence, times) if times >= 2 else None
