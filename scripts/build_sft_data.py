"""Build the stage-1 training set of the shipped adapter from licence-clean sources.

    python scripts/build_sft_data.py MODEL_DIR --annotated gold.jsonl.gz --plain a.jsonl.gz \
        --per-source 350 --out train.jsonl

Annotated rows are taken as they are. Plain rows are annotated by rule and kept where the rule is
likely to be right: at least three chunks of some length whose topics are named at their
beginning. In long answers every chunk keeps its first sentences only, so that the model learns
answers of a length that it can finish; what is still too long ends behind one of its chunks.
Plain rows with no part at all stay in at a fifth of the number, so that it also learns when not
to promise; and a share of all answers comes in twice, the second time without its tags, so that
the same weights also write sequentially.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from pasta_decoding.data.annotate.structure import annotate
from pasta_decoding.data.dataset import Row, read_rows, write_rows
from pasta_decoding.lang.tree import Chunk, Node, Span, Tree, read, show, strip

MIN_CHUNKS = 3
MIN_CHUNK_TOKENS = 30
MIN_NAMED_SHARE = 0.9
NAMED_WITHIN_CHARS = 40
SENTENCE_END = re.compile(r"(?<=[a-z][a-z][a-z)\"][.!?])(?=\s|$)")
WRAPPED_QUESTION = re.compile(r"\[Question\]:(?P<question>.*?)\[Requirements\]:", re.S)


def main() -> None:
    options = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count_tokens = partial(_count, tokenizer)
    annotated = [row for path in options.annotated for row in read_rows(path)]
    trees = [shorten(read(row.response), count_tokens, options.max_tokens) for row in annotated]
    rows = [
        replace(row, response=show(tree))
        for row, tree in zip(annotated, trees, strict=True)
        if tree
    ]
    seen = {unwrap(row).instruction for row in rows}
    for path in options.plain:
        plain = [unwrap(row) for row in read_rows(path) if row.response]
        new = [row for row in plain if row.instruction not in seen]
        random.Random(options.seed).shuffle(new)
        chosen = list(choose(new, count_tokens, options))
        seen |= {row.instruction for row in chosen}
        rows += chosen
        promised = sum("<promise" in row.response for row in chosen)
        print(f"{path.name}: {len(chosen)} rows, {promised} with a promise")
    rows += without_tags(rows, options.plain_share, options.seed)
    print(f"{write_rows(options.out, rows)} rows in {options.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--annotated", type=Path, nargs="+", required=True)
    parser.add_argument("--plain", type=Path, nargs="*", default=[])
    parser.add_argument("--per-source", type=int, default=350)
    parser.add_argument("--max-tokens", type=int, default=330)
    parser.add_argument("--per-prompt", type=int, default=2)
    parser.add_argument("--plain-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def unwrap(row: Row) -> Row:
    """Return the row with the bare question where the instruction wraps one in requirements."""
    found = WRAPPED_QUESTION.search(row.instruction)
    return replace(row, instruction=found["question"].strip()) if found else row


def choose(
    rows: list[Row], count_tokens: Callable[[str], int], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield rows with good parts up to `--per-source`, and plain ones up to a fifth of it."""
    limit, max_tokens = options.per_source, options.max_tokens
    promised = plain = 0
    taken: Counter[str] = Counter()
    for row in rows:
        if taken[row.instruction] == options.per_prompt:
            continue
        tree = read(annotate(row.response, count_tokens))
        if not any(isinstance(node, Chunk) for node in tree):
            if plain < limit // 5 and count_tokens(row.response) <= max_tokens:
                plain += 1
                taken[row.instruction] += 1
                yield row
            continue
        short = shorten(tree, count_tokens, max_tokens)
        if promised < limit and teaches(short):
            promised += 1
            taken[row.instruction] += 1
            yield replace(row, response=show(short))


def shorten(tree: Tree, count_tokens: Callable[[str], int], max_tokens: int) -> Tree:
    """Return `tree` with the first sentences of every chunk only, or without its last chunks too.

    Of the forms that fit, the one that says most about every part; empty if none does.
    """
    for sentences in (None, 4, 3, 2):
        short = tuple(_first_sentences(node, sentences, count_tokens) for node in tree)
        if count_tokens(strip(short)) <= max_tokens:
            return short
    chunks = [place for place, node in enumerate(short) if isinstance(node, Chunk)]
    fitting = [place for place in chunks if count_tokens(strip(short[: place + 1])) <= max_tokens]
    return short[: fitting[-1] + 1] if fitting else ()


def _first_sentences(node: Node, sentences: int | None, count_tokens: Callable[[str], int]) -> Node:
    if not isinstance(node, Chunk) or sentences is None:
        return node
    ends = [found.end() for found in SENTENCE_END.finditer(node.text)]
    text = node.text[: ends[sentences - 1]] if len(ends) >= sentences else node.text
    return replace(node, text=text, tokens=max(10, -(-count_tokens(text) // 10) * 10))


def without_tags(rows: list[Row], share: float, seed: int) -> Iterator[Row]:
    """Yield the plain form of a share of the rows that promise something."""
    promising = [row for row in rows if "<promise" in row.response]
    for row in random.Random(seed).sample(promising, int(share * len(promising))):
        yield replace(row, id=f"{row.id}/plain", response=strip(read(row.response)))


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
