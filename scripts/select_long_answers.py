"""Keep, of a stage-1 training set, the answers that teach long answers with several chunks.

    python scripts/select_long_answers.py MODEL_DIR train.jsonl --out long.jsonl

Human answers are short, and a model that has seen many of them promises short chunks. A second
phase on what this keeps lengthens them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from pasta_decoding.data.dataset import Row, read_rows, write_rows
from pasta_decoding.lang.tree import Chunk, read, strip

MIN_CHUNKS = 3
MIN_TOKENS = 110
MIN_PLAIN_TOKENS = 150  # of MedQuAD, and of answers without tags
MAX_PROMPT_TOKENS = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    kept = [
        row for row in read_rows(options.rows) if keeps(row, lambda s: len(tokenizer.encode(s)))
    ]
    print(f"{write_rows(options.out, kept)} rows in {options.out}")


def keeps(row: Row, count_tokens: Callable[[str], int]) -> bool:
    """Is the answer long, in several chunks or in none on purpose, and its prompt short?"""
    tree = read(row.response)
    tokens = count_tokens(strip(tree))
    chunks = sum(isinstance(node, Chunk) for node in tree)
    if count_tokens(row.instruction) > MAX_PROMPT_TOKENS:
        return False
    if row.id.endswith("/plain"):
        return tokens >= MIN_PLAIN_TOKENS
    least = MIN_PLAIN_TOKENS if row.source.startswith("medquad") else MIN_TOKENS
    return chunks >= MIN_CHUNKS and tokens >= least


if __name__ == "__main__":
    main()
