"""What annotated answers would ask of servers: requests, prompts, and what a prefix cache saves.

    python bench/remote_plan.py data/annotated_clean.jsonl.gz --limit 300 --block 16

Arithmetic over layouts under the `text` join, no model and no server: every whole block that a
request shares with an earlier one of its answer counts as cached, nothing is evicted, and no
token is taken back. One JSON line; means are per answer with a chunk, per fork and per sync.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pasta_decoding.cli.console import base_folder
from pasta_decoding.data.dataset import Row, read_rows
from pasta_decoding.lang.layout import ChunkRun, Layout, lay_out_rows
from pasta_decoding.lang.tree import read
from pasta_decoding.models.control_tokens import ControlTokens, choose_tokens
from pasta_decoding.models.load import load_tokenizer
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.view import segments_of


def prompts_of(rows: tuple[Layout, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield every request's kind, prompt tokens, and how many begin as an earlier request."""
    first = sum(step == 0 for step in rows[0].step)
    yield "first", first, 0
    for number, row in enumerate(rows):
        if number:
            before = rows[number - 1]
            thread = min(thread for thread in before.thread if thread)
            copy = sum(step == row.step[0] for step in row.step)
            yield "sync", copy, before.thread.index(thread) + before.thread.count(thread)
        for place, thread in enumerate(row.thread):
            if thread and row.thread[place - 1] != thread:
                yield "fork", row.position[place] + 1, row.position[place]


def figures(rows: list[Row], encoder: PromptEncoder, control: ControlTokens, block: int) -> Any:
    found: list[tuple[str, int, int]] = []
    answers = tokens = 0
    for row in rows:
        segments = segments_of(read(row.response), control, encoder.encode_text)
        if any(isinstance(segment, ChunkRun) for segment in segments):
            prompt = encoder.encode([Message("user", row.instruction)])
            found += prompts_of(
                lay_out_rows(prompt, segments, async_close=control.async_close, end=None)
            )
            answers += 1
            tokens += sum(len(getattr(segment, "ids", (0,))) for segment in segments)
    cached = [(kind, size, shared // block * block) for kind, size, shared in found]
    computed = {
        kind: [size - known for one, size, known in cached if one == kind]
        for kind in ("fork", "sync")
    }
    return {
        "answers": answers,
        "answer_tokens": round(tokens / answers, 1),
        "forks": round(len(computed["fork"]) / answers, 2),
        "syncs": round(len(computed["sync"]) / answers, 3),
        "prompt_tokens": round(sum(size for _, size, _ in cached) / answers, 1),
        "cached_share": round(
            sum(known for _, _, known in cached) / sum(size for _, size, _ in cached), 3
        ),
        "prefill_per_fork": round(sum(computed["fork"]) / max(1, len(computed["fork"])), 1),
        "prefill_per_sync": round(sum(computed["sync"]) / max(1, len(computed["sync"])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--block", type=int, default=16)
    options = parser.parse_args()
    rows = list(read_rows(options.rows))
    random.Random(0).shuffle(rows)
    tokenizer = load_tokenizer(base_folder(options.model))
    control = choose_tokens(tokenizer)
    encoder = PromptEncoder(tokenizer, forbidden_ids=control.ids)
    print(json.dumps(figures(rows[: options.limit], encoder, control, options.block)))


if __name__ == "__main__":
    main()
