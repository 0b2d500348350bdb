"""The benchmarks run, and their lines say what was measured. How fast is not a test's business."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def lines_of(script: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a benchmark in this process, and return its lines, which do not go to bench/results."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        run(script, *arguments)
    found = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert all({"benchmark", "machine", "commit", "date"} <= line.keys() for line in found)
    return found


def run(script: str, *arguments: object) -> None:
    """Run a benchmark in this process: one of its own would import torch again."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("BENCH_DRY", "1")
        here.setattr(sys, "path", [str(BENCH), *sys.path])
        here.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(BENCH / script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


def test_a_step_has_a_line_for_each_number_of_threads_and_of_requests() -> None:
    sizes = ("--shape", "tiny", "--widths", 1, 2, "--repeats", 1, "--slots", 16, "--ctx", 512)
    found = lines_of("width_cost.py", *sizes)
    assert [(line.get("threads"), line.get("requests")) for line in found] == [
        (1, None),
        (2, None),
        (None, 1),
        (None, 2),
    ]
    assert all(line["seconds"]["min"] > 0 for line in found)
