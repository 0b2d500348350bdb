"""Answers damaged on purpose, about as long as before: what every judge of worth must see.

A judge can agree with people on real pairs and still prefer nonsense that it never met there; a
model that is trained to please it will find that. Each kind is a source of its own, `damaged-KIND`.

- shuffled: the words in another order, all of them.
- swapped:  the answer to another prompt, one of about the same length.
- looped:   its start again and again, up to its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from random import Random

from pasta_decoding.eval.judge.base import FOLDS, Pair, fingerprint, fold

_MIN_WORDS = 20
_LOOPED_SHARE = 0.3


def damaged_pairs(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield up to three pairs a prompt: one of its better answers against kinds of damage to it.

    Prompts all of whose better answers are short are left out: little can be broken there. So
    is damage that changes nothing.
    """
    whole: dict[str, str] = {}
    for pair in pairs:
        better = pair.a if pair.preference >= 0.5 else pair.b
        if len(better.split()) >= _MIN_WORDS:
            whole.setdefault(pair.prompt, better)
    swapped = _swapped(whole)
    for prompt, answer in whole.items():
        damaged = {"shuffled": _shuffled(prompt, answer), "looped": _looped(answer)}
        if prompt in swapped:
            damaged["swapped"] = swapped[prompt]
        for kind, worse in damaged.items():
            if worse != answer:
                yield Pair(f"damaged-{kind}", prompt, answer, worse, 1.0)


def _shuffled(prompt: str, answer: str) -> str:
    """Put the words into an order drawn with the prompt as a seed; the gaps stay in theirs."""
    gaps, words = re.findall(r"\s+", answer.strip()), answer.split()
    Random(fingerprint(prompt)).shuffle(words)
    return "".join(word + gap for word, gap in zip(words, [*gaps, ""], strict=True))


def _swapped(whole: dict[str, str]) -> dict[str, str]:
    """Let prompts whose answers are about equally long exchange them, two by two.

    Within a fold, since what is held out must not be trained on as somebody else's answer.
    """
    swapped: dict[str, str] = {}
    for one_fold in range(FOLDS):
        ordered = sorted((p for p in whole if fold(p) == one_fold), key=lambda p: len(whole[p]))
        for one, other in zip(ordered[::2], ordered[1::2], strict=False):
            swapped |= {one: whole[other], other: whole[one]}
    return swapped


def _looped(answer: str) -> str:
    """Repeat the start, cut behind a sentence if one ends there."""
    start = answer[: max(20, int(len(answer) * _LOOPED_SHARE))]
    end = max(start.rfind(mark) for mark in (". ", "! ", "? ", "\n")) + 1
    part = start[: end or len(start)].strip() + " "
    return (part * (len(answer) // len(part) + 1))[: len(answer)].rstrip()
