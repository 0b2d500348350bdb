"""Building a training set: what is left out of the rows at hand, and why.

Responses may be plain or in the text form; lengths count the plain text.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from typer import Option

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Tree, has_chunk, read, show, strip

GRAM_WORDS = 8
OF_THEIRS = 0.5
OF_OURS = 0.6

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a row must be to stay. Lengths are in tokens of the model that will be trained."""

    min_tokens: Annotated[
        int, Option(min=0, help="Leave out shorter responses, counted without tags.")
    ] = 1
    max_total_tokens: Annotated[
        int | None, Option(min=1, help="Leave out longer rows, counted with their prompt.")
    ] = None
    per_prompt: Annotated[
        int | None, Option(min=1, help="Keep this many responses of one prompt.")
    ] = None
    limit: Annotated[int | None, Option(min=1, help="Keep this many rows in all.")] = None


def choose(
    rows: Iterable[Row],
    wanted: Wanted,
    count_tokens: Callable[[str], int],
    evaluated: Iterable[str] = (),
) -> tuple[list[Row], Counter[str]]:
    """Return the rows that stay, always in the same order, and why others went.

    evaluated: prompts of evaluation sets.
    """
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    contaminated = Contamination(evaluated)
    kept: dict[tuple[str, str], Row] = {}
    of_prompt: Counter[str] = Counter()
    dropped: Counter[str] = Counter()

    def fits(asked: int, said: int) -> bool:
        most = wanted.max_total_tokens
        return said >= wanted.min_tokens and (most is None or asked + said <= most)

    def reason(row: Row, tree: Tree, key: tuple[str, str]) -> str | None:
        """Return the first reason against a row; the cheap ones come first."""
        plain = strip(tree)
        against: dict[str, Callable[[], bool]] = {
            "over the limit": lambda: len(kept) == wanted.limit,
            "empty": lambda: not row.instruction.strip() or not plain.strip(),
            "malformed": lambda: any(check(row.response, topic_required=False)),
            "annotated twice": lambda: has_chunk(read(plain)),
            "in an evaluation set": lambda: row.instruction in contaminated,
            "length": lambda: not fits(*map(count_tokens, (row.asked, plain))),
            "duplicate": lambda: key in kept,
            "prompt often enough": lambda: of_prompt[key[0]] == wanted.per_prompt,
        }
        return next((name for name, holds in against.items() if holds()), None)

    for row in shuffled:
        tree = read(row.response)
        key = normalised(row.asked), normalised(strip(tree))
        if found := reason(row, tree, key):
            dropped[found] += 1
            continue
        of_prompt[key[0]] += 1
        kept[key] = replace(row, response=show(tree))
    return list(kept.values()), dropped


class Contamination:
    """Knows the prompts of evaluation sets.

    A prompt is contaminated if its words are those of one of them, or if it shares half of one's
    runs of eight words, or if six tenths of its own are in one. Case and punctuation do not count.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self._exact: set[str] = set()
        self._sizes: list[int] = []
        self._holders: defaultdict[str, set[int]] = defaultdict(set)
        for number, prompt in enumerate(prompts):
            self._exact.add(normalised(prompt))
            runs = runs_of_words(prompt)
            self._sizes.append(len(runs))
            for run in runs:
                self._holders[run].add(number)

    def __contains__(self, prompt: str) -> bool:
        if normalised(prompt) in self._exact:
            return True
        ours = runs_of_words(prompt)
        shared = Counter(number for run in ours for number in self._holders.get(run, ()))
        return any(
            count >= OF_THEIRS * self._sizes[number] or count >= OF_OURS * len(ours)
            for number, count in shared.items()
        )


def normalised(text: str) -> str:
    """Return the words of `text` in lower case, single spaces between them."""
    return " ".join(_WORD.findall(text.casefold()))


def runs_of_words(text: str) -> set[str]:
    """Return the runs of eight words that `text` holds, normalised."""
    words = normalised(text).split()
    starts = range(len(words) - GRAM_WORDS + 1)
    return {" ".join(words[start : start + GRAM_WORDS]) for start in starts}
