"""Build the stage-1 training set of the shipped adapter from licence-clean sources.

    python scripts/build_sft_data.py MODEL_DIR --annotated gold.jsonl.gz --plain a.jsonl.gz \
        --per-source 350 --out train.jsonl

Annotated rows are taken as they are. Plain rows are annotated by rule and kept where the rule is
likely to be right: at least three chunks of some length whose topics are named at their
beginning. Long answers end behind one of their parts, so that the model learns answers of a
length that it can finish. Plain rows with no part at all stay in at a fifth of the number, so
that it also learns when not to promise.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from pasta_decoding.data.annotate.structure import annotate
from pasta_decoding.data.dataset import Row, read_rows, write_rows
from pasta_decoding.lang.tree import Chunk, Span, Tree, read, show, strip

MIN_CHUNKS = 3
MIN_CHUNK_TOKENS = 30
MIN_NAMED_SHARE = 0.75
NAMED_WITHIN_CHARS = 60


def main() -> None:
    options = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count_tokens = partial(_count, tokenizer)
    rows = [row for path in options.annotated for row in read_rows(path)]
    seen = {row.instruction for row in rows}
    for path in options.plain:
        new = [row for row in read_rows(path) if row.response and row.instruction not in seen]
        random.Random(options.seed).shuffle(new)
        chosen = list(choose(new, count_tokens, options.per_source, options.max_tokens))
        seen |= {row.instruction for row in chosen}
        rows += chosen
        promised = sum("<promise" in row.response for row in chosen)
        print(f"{path.name}: {len(chosen)} rows, {promised} with a promise")
    print(f"{write_rows(options.out, rows)} rows in {options.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--annotated", type=Path, nargs="+", required=True)
    parser.add_argument("--plain", type=Path, nargs="*", default=[])
    parser.add_argument("--per-source", type=int, default=350)
    parser.add_argument("--max-tokens", type=int, default=330)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def choose(
    rows: list[Row], count_tokens: Callable[[str], int], limit: int, max_tokens: int
) -> Iterator[Row]:
    """Yield rows with good parts up to `limit`, and plain ones up to a fifth of it."""
    promised = plain = 0
    instructions = set()
    for row in rows:
        if row.instruction in instructions:
            continue
        tree = read(annotate(row.response, count_tokens))
        if not any(isinstance(node, Chunk) for node in tree):
            if plain < limit // 5 and count_tokens(row.response) <= max_tokens:
                plain += 1
                instructions.add(row.instruction)
                yield row
            continue
        short = shorten(tree, count_tokens, max_tokens)
        if promised < limit and teaches(short):
            promised += 1
            instructions.add(row.instruction)
            yield replace(row, response=show(short))


def shorten(tree: Tree, count_tokens: Callable[[str], int], max_tokens: int) -> Tree:
    """Return the longest beginning that fits, ending behind a chunk; all of it if that fits."""
    if count_tokens(strip(tree)) <= max_tokens:
        return tree
    chunks = [place for place, node in enumerate(tree) if isinstance(node, Chunk)]
    fitting = [place for place in chunks if count_tokens(strip(tree[: place + 1])) <= max_tokens]
    return tree[: fitting[-1] + 1] if fitting else ()


def teaches(tree: Tree) -> bool:
    """Has the answer several chunks worth a thread, most of which name their topic at once?"""
    chunks = [node for node in tree if isinstance(node, Chunk)]
    long = [chunk for chunk in chunks if chunk.tokens >= MIN_CHUNK_TOKENS]
    named = [
        named_at_once(tree, place) for place, node in enumerate(tree) if isinstance(node, Chunk)
    ]
    return len(long) >= MIN_CHUNKS and sum(named) / len(named) >= MIN_NAMED_SHARE


def named_at_once(tree: Tree, place: int) -> bool:
    """Does the chunk, or the main text right before it, begin with a word of its topic?"""
    chunk = tree[place]
    assert isinstance(chunk, Chunk), "called with the place of a chunk"
    before = tree[place - 1] if place else None
    lead = before.text[-NAMED_WITHIN_CHARS:] if isinstance(before, Span) else ""
    near = (lead + chunk.text[:NAMED_WITHIN_CHARS]).lower()
    words = [word for word in (chunk.topic or "").lower().split() if len(word) > 2]
    return bool(words) and all(word in near for word in words)


def _count(tokenizer: object, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
