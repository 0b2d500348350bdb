"""Building a training set: what is left out of the rows at hand and why, and a set in figures.

Responses may be plain or in the text form; lengths count the plain text.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, quantiles
from typing import Annotated, Any

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.check import check
from pasta_decoding.lang.markup import lift_markup
from pasta_decoding.lang.measures import geometric_mean, ideal_speedup
from pasta_decoding.lang.tree import Chunk, Sync, has_chunk, read, strip, text_form
from pasta_decoding.setting import Setting

GRAM_WORDS = 8
OF_THEIRS = 0.5
OF_OURS = 0.6

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class SelectionLimits:
    """What a row must be to stay. Lengths are in tokens of the model that will be trained."""

    max_total_tokens: Annotated[
        int | None, Setting("Leave out longer rows, counted with their prompt.", min=1)
    ] = None
    per_prompt: Annotated[int | None, Setting("Keep this many responses of one prompt.", min=1)] = (
        None
    )
    limit: Annotated[int | None, Setting("Keep this many rows in all.", min=1)] = None


def select_rows(
    rows: Iterable[Row],
    wanted: SelectionLimits,
    count_tokens: Callable[[str], int],
    evaluated: Iterable[str] = (),
) -> tuple[list[Row], Counter[str]]:
    """Return the rows that stay, always in the same order, and why others went."""
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    is_contaminated = contamination(evaluated)
    kept: dict[tuple[str, str], Row] = {}
    of_prompt: Counter[str] = Counter()
    dropped: Counter[str] = Counter()

    def against(row: Row, plain: str, key: tuple[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield what may speak against a row, and whether it does; the cheap ones come first."""
        yield "over the limit", len(kept) == wanted.limit
        yield "empty", not row.instruction.strip() or not plain.strip()
        yield "malformed", any(check(row.response, topic_required=False))
        yield "annotated twice", has_chunk(read(plain))
        yield "in an evaluation set", is_contaminated(row.instruction)
        most = wanted.max_total_tokens or math.inf
        yield "length", sum(map(count_tokens, (row.asked, plain))) > most
        yield "duplicate", key in kept
        yield "prompt often enough", of_prompt[key[0]] == wanted.per_prompt

    for row in shuffled:
        tree = read(row.response)
        plain = strip(tree)
        key = normalised(row.asked), normalised(plain)
        if reason := next((name for name, holds in against(row, plain, key) if holds), None):
            dropped[reason] += 1
            continue
        of_prompt[key[0]] += 1
        kept[key] = replace(row, response=text_form(lift_markup(tree)))
    return list(kept.values()), dropped


def contamination(prompts: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that knows prompts of evaluation sets.

    A prompt is contaminated if its words are those of one of them, or if it shares half of one's
    runs of eight words, or if six tenths of its own are in one. Case and punctuation do not count.
    """
    exact: set[str] = set()
    sizes: list[int] = []
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for number, prompt in enumerate(prompts):
        exact.add(normalised(prompt))
        runs = runs_of_words(prompt)
        sizes.append(len(runs))
        for run in runs:
            holders[run].add(number)

    def is_contaminated(prompt: str) -> bool:
        ours = runs_of_words(prompt)
        shared = Counter(number for run in ours for number in holders.get(run, ()))
        return normalised(prompt) in exact or any(
            count >= OF_THEIRS * sizes[number] or count >= OF_OURS * len(ours)
            for number, count in shared.items()
        )

    return is_contaminated


def normalised(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


def runs_of_words(text: str) -> set[str]:
    """Return the runs of eight words that `text` holds, normalised."""
    words = normalised(text).split()
    starts = range(len(words) - GRAM_WORDS + 1)
    return {" ".join(words[start : start + GRAM_WORDS]) for start in starts}


# Figures


def measure_rows(rows: Iterable[Row], count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return the figures of a set, and of each of its sources; lengths are in tokens."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        tree = read(row.response)
        measured = {
            "plain_tokens": count_tokens(strip(tree)),
            "chunk_tokens": [count_tokens(node.text) for node in tree if isinstance(node, Chunk)],
            "syncs": sum(isinstance(node, Sync) for node in tree),
            "ideal_speedup": ideal_speedup(tree, count_tokens),
        }
        groups[row.source.partition("/")[0]].append(measured)
    sources = {source: _figures(group) for source, group in sorted(groups.items())}
    return _figures([one for group in groups.values() for one in group]) | {"sources": sources}


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    promising = [row for row in rows if row["chunk_tokens"]]
    chunk_tokens = [tokens for row in rows for tokens in row["chunk_tokens"]]
    return {
        "rows": len(rows),
        "with_chunk": len(promising),
        "chunks": len(chunk_tokens),
        "syncs": sum(row["syncs"] for row in rows),
        "plain_tokens": _spread([row["plain_tokens"] for row in rows]),
        "chunk_tokens": _spread(chunk_tokens),
        "ideal_speedup": _speedup(rows),
        "ideal_speedup_with_chunk": _speedup(promising),
    }


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    mean = round(fmean(values), 1)
    return {"sum": sum(values), "mean": mean, "p10": cuts[0], "p50": cuts[4], "p90": cuts[8]}


def _speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    found = geometric_mean(row["ideal_speedup"] for row in rows)
    return None if found is None else round(found, 3)
