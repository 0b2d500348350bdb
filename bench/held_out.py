"""What held-out annotated answers cost checkpoints, in nats a token, part by part.

    python bench/held_out.py data/annotated_clean.jsonl.gz run_max/adapter run_sum/adapter

Every checkpoint reads the same answers laid out as it was trained: its positions, with topics or
without. Only held-out rows with a promise count. One JSON line for each checkpoint: nats of the
tags, of chunks, and of the main thread before any promise, behind one and behind a sync. Topics are
left out. Intervals (95 %) are over answers, and differences to the first checkpoint are paired.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from common import emit

from pasta_decoding.cli.console import base_folder
from pasta_decoding.data.dataset import Row, is_held_out, read_rows
from pasta_decoding.evaluation.bootstrap import Drawn, FloatArray, drawn
from pasta_decoding.lang.layout import MAIN, Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import has_chunk, read, without_topics
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.models.load import find_adapter, load_model
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.score import score_layouts
from pasta_decoding.training.view import compile_answer

PARTS = ("tags", "chunk", "before", "promised", "synced", "all")
TOPIC = "topic"


def parts(layout: Layout, control: ControlTokens) -> Iterator[str]:
    """Yield the part of every label in order; `topic` for those that are left out."""
    stage, in_topic = "before", False
    for thread, token, label in zip(layout.thread, layout.tokens, layout.label, strict=True):
        if thread == MAIN:
            in_topic = token == control.promise_open or (in_topic and token not in control.ids)
            if token == control.sync:
                stage = "synced"
            elif token in control.promise_close.values() and stage == "before":
                stage = "promised"
        if label is None:
            continue
        if label in control.ids:
            yield "tags"
        elif thread != MAIN:
            yield "chunk"
        else:
            yield TOPIC if in_topic else stage


def read_costs(folder: Path, rows: Sequence[Row], model: Path | None) -> FloatArray:
    """Return costs_PF of P answers: nats and number of labels, for each of `PARTS`."""
    loaded = load_model(base_folder(model), folder, dtype="float32")
    loaded.model.eval()
    checkpoint = loaded.checkpoint
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=checkpoint.control.ids)
    layouts = []
    for row in rows:
        tree = read(row.response)
        layouts += compile_answer(
            encoder.encode([Message("user", row.instruction)]),
            tree if checkpoint.topic == "required" else without_topics(tree),
            control=checkpoint.control,
            encode=encoder.encode_text,
            scheme=scheme_named(checkpoint.scheme),
            end=loaded.end,
            max_tokens=loaded.model.config.max_position_embeddings,
        )
    costs_PF = np.zeros((len(rows), 2 * len(PARTS)))
    scored = score_layouts(loaded.model, layouts)
    for cost_F, layout, logprobs_L in zip(costs_PF, layouts, scored, strict=True):
        named = zip(parts(layout, checkpoint.control), logprobs_L.tolist(), strict=True)
        for part, logprob in named:
            for name in () if part == TOPIC else (part, "all"):
                place = 2 * PARTS.index(name)
                cost_F[place] -= logprob
                cost_F[place + 1] += 1
    return costs_PF


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    rows = [
        row
        for row in read_rows(options.rows)
        if is_held_out(row.id) and has_chunk(read(row.response))
    ][: options.limit]

    first: dict[str, Drawn] = {}
    for name in options.checkpoints:
        costs_PF = read_costs(find_adapter(name), rows, options.model)
        fields: dict[str, object] = {}
        for place, part in enumerate(PARTS):
            cost_P2 = costs_PF[:, 2 * place : 2 * place + 2]
            nats = drawn(cost_P2, lambda sums: sums[..., 0] / sums[..., 1])
            moved = nats.minus(first.setdefault(part, nats)).interval()
            fields[part] = {
                "labels": int(cost_P2[:, 1].sum()),
                "nats": round(nats.value, 4),
                "more": [
                    round(found, 4)
                    for found in (moved.value, moved.low, moved.high)
                    if found is not None
                ],
            }
        emit("held_out", checkpoint=name, rows=options.rows.name, answers=len(rows), **fields)


if __name__ == "__main__":
    main()
