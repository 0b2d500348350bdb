"""Put together the third phase of the shipped adapter: its own good answers, long ones of others.

    python scripts/mix_own_answers.py own.jsonl long.jsonl --out third.jsonl

All kept parallel answers stay; sequential ones and those of others are drawn.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

from pasta_decoding.data.dataset import read_rows, write_rows

MAX_PROMPT_CHARS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("own", type=Path, help="what sample_own_answers.py wrote")
    parser.add_argument("others", type=Path, help="what select_long_answers.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequential", type=int, default=140)
    parser.add_argument("--from-others", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kept = [row for row in read_rows(options.own) if row.extra["verdict"] == "kept"]
    parallel = [row for row in kept if row.id.endswith("/parallel")]
    sequential = [row for row in kept if row.id.endswith("/sequential")]
    others = [
        row
        for row in read_rows(options.others)
        if "<promise" in row.response and len(row.instruction) < MAX_PROMPT_CHARS
    ]
    draw.shuffle(sequential)
    draw.shuffle(others)
    rows = [*parallel, *sequential[: options.sequential], *others[: options.from_others]]
    written = write_rows(options.out, [replace(row, extra={}) for row in rows])
    print(f"{written} rows in {options.out}")


if __name__ == "__main__":
    main()
