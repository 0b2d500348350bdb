"""Building a training set: selects rows, counts why others are dropped, and measures a set.

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
MAX_SHARED_OF_EVALUATED = 0.5
MAX_SHARED_OF_ROW = 0.6

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class SelectionLimits:
    """Limits on rows. Lengths are in tokens of the model that will be trained."""

    max_total_tokens: Annotated[
        int | None, Setting("Leave out longer rows, counted with their prompt.", min=1)
    ] = None
    per_prompt: Annotated[int | None, Setting("Keep this many responses of one prompt.", min=1)] = (
        None
    )
    limit: Annotated[int | None, Setting("Keep this many rows in all.", min=1)] = None


def select_rows(
    rows: Iterable[Row],
    limits: SelectionLimits,
    count_tokens: Callable[[str], int],
    evaluated: Iterable[str] = (),
) -> tuple[list[Row], Counter[str]]:
    """Return the selected rows, shuffled with a fixed seed, and how many others each reason drops.

    evaluated: prompts of evaluation sets; rows with such prompts are dropped.
    """
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    is_contaminated = contamination(evaluated)
    max_tokens = limits.max_total_tokens or math.inf
    selected: dict[tuple[str, str], Row] = {}
    responses_per_prompt: Counter[str] = Counter()
    dropped: Counter[str] = Counter()

    def reasons_to_drop(row: Row, plain: str, key: tuple[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield each reason and whether it holds for the row, the cheap ones first."""
        yield "over the limit", len(selected) == limits.limit
        yield "empty", not row.instruction.strip() or not plain.strip()
        yield "malformed", any(check(row.response, topic_required=False))
        yield "annotated twice", has_chunk(read(plain))
        yield "in an evaluation set", is_contaminated(row.instruction)
        yield "length", count_tokens(row.prompt_text) + count_tokens(plain) > max_tokens
        yield "duplicate", key in selected
        yield "prompt often enough", responses_per_prompt[key[0]] == limits.per_prompt

    for row in shuffled:
        tree = read(row.response)
        plain = strip(tree)
        key = (normalised(row.prompt_text), normalised(plain))
        reasons = (reason for reason, holds in reasons_to_drop(row, plain, key) if holds)
        first_reason = next(reasons, None)
        if first_reason is not None:
            dropped[first_reason] += 1
            continue
        responses_per_prompt[key[0]] += 1
        selected[key] = replace(row, response=text_form(lift_markup(tree)))
    return list(selected.values()), dropped


def contamination(prompts: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a prompt is too near to one of these prompts.

    It is too near to a prompt with the same words. It is too near as well if it shares runs of
    eight words with it: half of the other prompt's runs, or six tenths of its own. Case and
    punctuation do not count.
    """
    normalised_prompts: set[str] = set()
    run_counts: list[int] = []
    prompts_with_run: defaultdict[str, set[int]] = defaultdict(set)
    for number, prompt in enumerate(prompts):
        normalised_prompts.add(normalised(prompt))
        runs = runs_of_words(prompt)
        run_counts.append(len(runs))
        for run in runs:
            prompts_with_run[run].add(number)

    def is_contaminated(prompt: str) -> bool:
        if normalised(prompt) in normalised_prompts:
            return True
        runs = runs_of_words(prompt)
        shared_runs: Counter[int] = Counter()
        for run in runs:
            shared_runs.update(prompts_with_run.get(run, ()))
        return any(
            count >= MAX_SHARED_OF_EVALUATED * run_counts[number]
            or count >= MAX_SHARED_OF_ROW * len(runs)
            for number, count in shared_runs.items()
        )

    return is_contaminated


def normalised(text: str) -> str:
    """Return the words of a text without case and punctuation, a space between them."""
    return " ".join(_WORD.findall(text.casefold()))


def runs_of_words(text: str) -> set[str]:
    """Return all runs of eight neighbouring words of a text, normalised."""
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
    all_rows = [measured for group in groups.values() for measured in group]
    return _figures(all_rows) | {"sources": sources}


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
    speedup = geometric_mean(row["ideal_speedup"] for row in rows)
    return None if speedup is None else round(speedup, 3)
