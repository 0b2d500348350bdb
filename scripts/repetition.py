"""How much a text repeats itself, for the scripts that sift answers."""

from __future__ import annotations


def repeated_grams(text: str) -> float:
    """Return the share of runs of four words that occurred before."""
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
