"""What the benchmarks share: the engines, ratios, and one JSON line a result."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.cli.console import cache_folder
from pasta_decoding.evaluation.metrics import geometric_interval
from pasta_decoding.evaluation.provenance import commit, machine
from pasta_decoding.scheduling.decoder import LocalDecoder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))  # answers are forced, and servers run, by helpers of the tests


def spread(values: Sequence[float], digits: int = 6) -> dict[str, float]:
    """Return min, median and max."""
    figures = {"min": min(values), "median": median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float | None]:
    """Return the median of paired ratios; their geometric mean, and its interval of 95 %."""
    ratios_P = np.asarray(slow) / np.asarray(fast)
    mean = asdict(geometric_interval(ratios_P))
    figures = {"median": float(np.median(ratios_P)), "mean": mean.pop("value"), **mean}
    return {name: value and round(value, 3) for name, value in figures.items()}


def emit(benchmark: str, *, text: str | None = None, **fields: object) -> None:
    """Print a result as a JSON line, or as `text`; add the line to bench/results/BENCHMARK.jsonl.

    With BENCH_DRY in the environment nothing is written.
    """
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    origin = {"machine": machine(), "commit": commit(), "date": date}
    line = json.dumps({"benchmark": benchmark, **fields, **origin})
    print(line if text is None else text, flush=True)
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
    parser.add_argument("--ctx", type=int, default=8192, help="tokens of all requests together")
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
