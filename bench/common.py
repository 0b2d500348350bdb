"""What the benchmarks share: repeated timings, one JSON line a result, and the engines."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.cli.console import cache_folder
from pasta_decoding.evaluation.metrics import geometric
from pasta_decoding.evaluation.records import commit, machine
from pasta_decoding.runtime.decoder import LocalDecoder

Name = TypeVar("Name")
Found = TypeVar("Found")

RESULTS = Path(__file__).parent / "results"
SAMPLE = Path(__file__).parents[1] / "examples" / "annotated.jsonl"


def spread(values: Sequence[float], digits: int = 6) -> dict[str, float]:
    """Return min, median and max."""
    ends = {"min": min(values), "median": median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in ends.items()}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float | None]:
    """Return the geometric mean of paired ratios, with its bootstrap interval of 95 %."""
    found = asdict(geometric(np.asarray(slow) / np.asarray(fast)))
    return {name: value and round(value, 3) for name, value in found.items()}


def interleaved(
    calls: dict[Name, Callable[[], Found]], repeats: int, *, warm: bool = True
) -> dict[Name, list[Found]]:
    """Call each in turn, `repeats` times round; `warm`: after one round that does not count."""
    values: dict[Name, list[Found]] = {name: [] for name in calls}
    gc.disable()
    for call in calls.values() if warm else ():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            values[name].append(call())
    gc.enable()
    return values


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def emit(benchmark: str, **fields: object) -> None:
    """Print one JSON line, and add it to `bench/results/BENCHMARK.jsonl`."""
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    where = {"machine": machine(), "commit": commit(), "date": when}
    line = json.dumps({"benchmark": benchmark, **fields, **where})
    print(line, flush=True)
    if "BENCH_DRY" not in os.environ:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{benchmark}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that name engines, such as torch:bfloat16 or llama:Q4_0."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["torch:auto"],
        help="fast:auto, torch:auto, torch:float32, llama:BF16, llama:Q4_0, ...",
    )
    parser.add_argument("--adapter")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device")
    return parser


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Number formats of a GGUF by the names of `--dtype`."""


def decoder_named(name: str, options: argparse.Namespace) -> LocalDecoder:
    """Load the engine called `name`."""
    engine, _, form = name.partition(":")
    loading = EngineConfig(
        adapter=options.adapter,
        model=options.model,
        engine=engine,
        cache_tokens=options.ctx,
        threads=options.threads,
        device=options.device,
    )
    return open_local(replace(loading, dtype=DTYPES.get(form, form)), cache_folder())
