"""Sample a checkpoint's own answers, in parallel and sequentially, and keep those worth teaching.

    python scripts/sample_own_answers.py ADAPTER PROMPTS.jsonl[.gz]... --out own.jsonl

A model that has only seen other people's answers repeats itself and finds no end. Its own answers
that did end, without repetition, without a limit or a constraint having stepped in, teach it
both. Every finished answer is appended with its verdict (`verdict` is "kept" for the good ones,
the response of the others is left out), and prompts that are already there are skipped, so a run
that was stopped goes on.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from pasta_decoding.cli.engine import EngineName, FileType, Loading
from pasta_decoding.data.dataset import Row, encode_row, read_rows
from pasta_decoding.lang.measures import own_speedup, repeated_chunks, repeated_grams
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling

MIN_SPEEDUP = 1.4
MAX_REPEATED_GRAMS = 0.05
AT_ONCE = 16


def main() -> None:
    options = parse_arguments()
    decoder = Loading(
        adapter=options.adapter,
        model=options.model,
        engine=EngineName.llama,
        quant=FileType.F16,
        threads=options.threads,
    ).decoder()
    done = {row.id for row in read_rows(options.out)} if options.out.exists() else set()
    waiting = [row for row in questions(options) if row.id not in done]
    fate: Counter[str] = Counter()
    with options.out.open("ab") as out, tqdm(total=len(waiting)) as bar:
        for row, answer in answered(decoder, waiting, options):
            plain_tokens = decoder.plain_tokens(answer.text)
            is_parallel = row.id.endswith("/parallel")
            verdict = judge(answer, plain_tokens, options.min_tokens, is_parallel)
            fate[verdict] += 1
            response = answer.annotated if verdict == "kept" else ""
            found = {"verdict": verdict, "plain_tokens": plain_tokens}
            out.write(encode_row(replace(row, response=response, extra=found)) + b"\n")
            out.flush()
            bar.set_postfix(fate)
            bar.update()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter")
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sources", nargs="+", default=[""], help="how their names begin")
    parser.add_argument("--limit", type=int, default=1000, help="prompts, each in both modes")
    parser.add_argument("--min-tokens", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-prompt-chars", type=int, default=250)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def questions(options: argparse.Namespace) -> list[Row]:
    """Return the chosen prompts, shuffled, each once for both modes."""
    prompts = {
        row.instruction: row
        for path in options.prompts
        for row in read_rows(path)
        if len(row.instruction) <= options.max_prompt_chars
        and row.source.startswith(tuple(options.sources))
    }
    rows = list(prompts.values())
    random.Random(options.seed).shuffle(rows)
    return [
        replace(row, id=f"{row.id}/own/{mode}", source=f"own/{row.source}", response="", extra={})
        for row in rows[: options.limit]
        for mode in ("parallel", "sequential")
    ]


def answered(
    decoder: Decoder, rows: list[Row], options: argparse.Namespace
) -> Iterator[tuple[Row, Answer]]:
    """Answer all rows, many at once, and yield each as it ends."""
    scheduler = decoder.scheduler()
    waiting = iter(enumerate(rows))
    running: dict[int, Row] = {}
    while True:
        for index, row in islice(waiting, AT_ONCE - len(running)):
            seed = options.seed * len(rows) + index
            sampling = Sampling(options.temperature, top_k=options.top_k, seed=seed)
            parallel = row.id.endswith("/parallel")
            rules = Rules(options.max_tokens, max_threads=8, max_chunks=12, parallel=parallel)
            running[scheduler.add(decoder.request(row.instruction, rules, sampling))] = row
        if not running:
            return
        scheduler.step()
        for number in list(running):
            if (answer := scheduler.result(number)) is not None:
                scheduler.forget(number)
                yield running.pop(number), answer


def judge(answer: Answer, plain_tokens: int, least: int, is_parallel: bool) -> str:
    """Return "kept", or the first reason against."""
    reasons = {
        "cut off": answer.truncated,
        "short": plain_tokens < least,
        "repeats": repeated_grams(answer.text) > MAX_REPEATED_GRAMS,
        "repeats a chunk": repeated_chunks(answer.tree) > 0,
        "overruled": is_parallel and answer.overruled > 0,
        "slow": is_parallel and own_speedup(plain_tokens, answer.critical_path) < MIN_SPEEDUP,
    }
    return next((reason for reason, holds in reasons.items() if holds), "kept")


if __name__ == "__main__":
    main()
