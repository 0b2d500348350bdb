"""People as judges: pairs for them to read that do not tell who wrote what, and what they said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import fmean

from pasta_decoding.evaluation.judge.base import JudgedPair

Triple = tuple[str, str, str]
"""A prompt and two answers."""


def blind(pairs: Iterable[Triple], *, both_orders: bool, seed: int) -> list[dict[str, str | None]]:
    """Return the pairs as lines that `judge/pairs.py` reads, each once, in an order of chance.

    Which answer comes first is chance, too, and nothing else tells them apart. Their label is
    None until somebody judges.

    both_orders: put each pair in twice, the second half with the answers the other way round.
    """
    draw = Random(seed)
    lines = [pair if draw.random() < 0.5 else _swapped(pair) for pair in dict.fromkeys(pairs)]
    draw.shuffle(lines)
    if both_orders:
        lines += [_swapped(line) for line in draw.sample(lines, len(lines))]
    return [
        {"prompt": prompt, "response_a": a, "response_b": b, "label": None}
        for prompt, a, b in lines
    ]


class Readers:
    """Knows what was said of some pairs, and is asked as a model would be.

    What several said of a pair, in whichever order, is averaged.
    """

    def __init__(
        self, judged: Iterable[JudgedPair], *, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._tick = tick
        self._said: dict[Triple, list[float]] = defaultdict(list)
        for one in judged:
            pair = one.prompt, one.a, one.b
            self._said[pair].append(one.preference)
            self._said[_swapped(pair)].append(1 - one.preference)

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the preference for a over b, one for each prompt; None where nobody said."""
        means: list[float | None] = []
        for pair in zip(prompts, a, b, strict=True):
            said = self._said.get(pair)
            means.append(fmean(said) if said else None)
            self._tick()
        return means


def _swapped(pair: Triple) -> Triple:
    prompt, a, b = pair
    return prompt, b, a
