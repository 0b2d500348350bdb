"""The benchmarks run, and their lines say what was measured. How fast is not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def lines_of(script: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a benchmark, keep its results out of bench/results, and return its lines."""
    done = subprocess.run(
        [sys.executable, BENCH / script, *map(str, arguments)],
        env=os.environ | {"BENCH_DRY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all({"benchmark", "machine", "commit", "date"} <= line.keys() for line in found)
    return found


def test_overhead_has_a_line_for_each_width_and_one_for_the_choice() -> None:
    *widths, choice = lines_of("overhead.py", "--repeats", 1)
    assert [line["threads"] for line in widths] == [1, 2, 4, 8, 16, 32]
    assert all(line["microseconds_per_thread_and_step"]["min"] > 0 for line in widths)
    assert choice["microseconds"]["min"] > 0


def test_the_gpu_replay_runs_anywhere_on_a_tiny_shape(embedded_dir: Path) -> None:
    where = ("--model", embedded_dir, "--shapes", "tiny", "--device", "cpu")
    found = lines_of("gpu_replay.py", *where, "--limit", 1, "--repeats", 1)
    assert [line["width"] for line in found if "width" in line] == [1, 2, 4, 8, 16, 32]
    padded = [line["padded_to"] for line in found if "padded_to" in line]
    assert padded == [[1, 256], [2, 256], [4, 256], [8, 256], [16, 256], [32, 512]]
    replays = [line for line in found if "replay_speedup" in line]
    assert replays[0]["answers"] == 1
    assert replays[0]["cells_beyond_tokens"] == 0
    assert replays[0]["replay_speedup"] > 0


def test_plots_are_drawn_from_the_lines(tmp_path: Path) -> None:
    line = {"engine": "llama F16", "machine": "m", "date": "2026-01-01"}
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    widths = [{**line, "width": width, "cost": 1.0 + width} for width in (1, 2, 4)]
    (results / "width_cost.jsonl").write_text("".join(json.dumps(w) + "\n" for w in widths))
    loads = [
        {**line, "server": "s", "mode": mode, "clients": clients}
        | {"plain_tokens_per_s": {"median": 90.0}, "latency_s": latency_s}
        for mode in ("sequential", "auto")
        for clients, latency_s in ((1, {"p50": 1.5}), (64, None))
    ]
    (results / "serve_load.jsonl").write_text("".join(json.dumps(one) + "\n" for one in loads))
    subprocess.run([sys.executable, BENCH / "plot.py", results, docs], check=True)
    drawn = sorted(path.name for path in docs.iterdir())
    assert drawn == ["serve_latency.png", "serve_load.png", "width_cost.png"]
    assert all((docs / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
