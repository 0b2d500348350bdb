"""Is a prompt of a training set also one of an evaluation set, or nearly so?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

GRAM_WORDS = 8
OF_THEIRS = 0.5
OF_OURS = 0.6

_WORD = re.compile(r"\w+")


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
            grams = runs_of_words(prompt)
            self._sizes.append(len(grams))
            for gram in grams:
                self._holders[gram].add(number)

    def __contains__(self, prompt: str) -> bool:
        if normalised(prompt) in self._exact:
            return True
        ours = runs_of_words(prompt)
        shared: defaultdict[int, int] = defaultdict(int)
        for gram in ours:
            for number in self._holders.get(gram, ()):
                shared[number] += 1
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
    return {
        " ".join(words[first : first + GRAM_WORDS]) for first in range(len(words) - GRAM_WORDS + 1)
    }
