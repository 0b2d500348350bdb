"""Made-up preferences: answers that repeat themselves lose, and length says nothing or a lot."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

from pasta_decoding.evaluation.judge.base import JudgedPair

WORDS = [f"{start}{end}" for start in ("ri", "sto", "clou", "pa", "gree") for end in "abcdefgh"]


def varied(draw: Random, words: int) -> str:
    """Sentences of random words."""
    chosen = [draw.choice(WORDS) for _ in range(words)]
    rows = [chosen[start : start + 9] for start in range(0, words, 9)]
    return " ".join(f"{' '.join(row).capitalize()}." for row in rows)


def repeating(draw: Random, words: int) -> str:
    """One short sentence again and again."""
    sentence = f"{' '.join(draw.choice(WORDS) for _ in range(4)).capitalize()}."
    return " ".join([sentence] * max(2, words // 4))


def made_up(
    prompts: int, *, source: str = "made_up", longer_wins: bool = False
) -> list[JudgedPair]:
    """Two pairs a prompt; the source takes the varied answer nine times in ten.

    longer_wins: the better answer is also twice as long.
    """
    draw = Random(prompts)
    pairs = []
    for number in range(2 * prompts):
        good, bad = (draw.randrange(20, 60) for _ in range(2))
        if longer_wins:
            good = 2 * bad
        better, worse = varied(draw, good), repeating(draw, bad)
        a_is_better = draw.random() < 0.5
        taken = a_is_better == (draw.random() < 0.9)
        a, b = (better, worse) if a_is_better else (worse, better)
        pairs.append(JudgedPair(source, f"What about {number // 2}?", a, b, float(taken)))
    return pairs


def write_pairs(path: Path, pairs: list[JudgedPair]) -> Path:
    """Write pairs as `pasta judge` reads them."""
    labels = {1.0: "a", 0.0: "b", 0.5: "tie"}
    lines = [
        {"prompt": p.prompt, "response_a": p.a, "response_b": p.b, "label": labels[p.preference]}
        for p in pairs
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
