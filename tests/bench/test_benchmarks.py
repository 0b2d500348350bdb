"""The benchmarks run, and their lines say what was measured. How fast is not a test's business."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pasta_decoding.data.questions import Question
from pasta_decoding.engines.scripted import follow
from pasta_decoding.runtime.local import torch_decoder
from pasta_decoding.runtime.sampler import Choice
from tests.checkpoint import TinyCheckpoint
from tests.server.scripts import ids, with_engine

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


def test_overhead_has_a_line_for_each_width_and_one_for_each_way_to_choose() -> None:
    found = lines_of("overhead.py", "--repeats", 1)
    widths, choices = found[:6], found[6:]
    assert [line["threads"] for line in widths] == [1, 2, 4, 8, 16, 32]
    assert all(line["microseconds_per_thread_and_step"]["min"] > 0 for line in widths)
    assert {line["choice"] for line in choices} >= {"greedy"}
    assert all(line["microseconds"]["min"] > 0 for line in choices)


def test_plots_are_drawn_from_the_lines(tmp_path: Path) -> None:
    line = {"engine": "llama F16", "machine": "m", "date": "2026-01-01"}
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    loads = [
        {**line, "server": "s", "mode": mode, "clients": clients}
        | {"plain_tokens_per_s": {"median": 90.0}, "latency_s": latency_s}
        for mode in ("sequential", "auto")
        for clients, latency_s in ((1, {"p50": 1.5}), (64, None))
    ]
    (results / "serve_load.jsonl").write_text("".join(json.dumps(one) + "\n" for one in loads))
    run("plot.py", results, docs)
    drawn = sorted(path.name for path in docs.iterdir())
    assert drawn == ["serve_latency.png", "serve_load.png"]
    assert all((docs / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_prompts_has_a_line_for_turns_for_choices_and_for_a_stream_beside_a_prompt(
    default_model_dir: Path,
) -> None:
    sizes = ("--prompt", 60, "--long", 300, "--repeats", 1)
    model = ("--model", default_model_dir, "--engines", "torch:bfloat16", "--ctx", 1024)
    turn, choices, beside = lines_of("prompts.py", *model, *sizes)
    assert [turn["what"], choices["what"], beside["what"]] == ["second turn", "choices", "beside"]
    assert turn["of_apart"]["median"] > 0
    assert choices["of_apart"]["median"] > 0
    assert beside["stream_of_alone"]["median"] > 0
    assert beside["prompt_of_alone"]["median"] > 0


def test_kept_lengths_has_a_median_for_each_length_that_is_forced(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"instruction": "What about {n}?"}}\n' for n in range(4)))
    where = ("--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter)
    engine = ("--engines", "torch:float32", "--ctx", 2048)
    (found,) = lines_of("kept_lengths.py", *where, *engine, "--prompts", prompts)
    assert found["asked"] == 4
    assert found["promising"] > 0
    assert found["medians"].keys() == {"20", "30", "40", "60", "100"}
    assert 0 <= found["kept"] <= 1
    assert found["slope"] is not None


def parts_of(script: str) -> dict[str, Any]:
    """Return what a benchmark defines."""
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys, "path", [str(BENCH), *sys.path])
        return runpy.run_path(str(BENCH / script), run_name="bench")


def test_the_tokens_of_the_chunk_behind_each_closing_are_counted(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    decoder = torch_decoder(tiny_checkpoint.base, tiny_checkpoint.adapter, cache_tokens=2048)
    control = decoder.vocabulary.control
    (letter,) = ids(decoder, "a")
    promise = (
        *ids(decoder, "assistant\n"),
        control.promise_open,
        letter,
        control.promise_close[50],
    )
    chunks = [
        (closing, control.async_open, *[letter] * (length // 10), control.async_close)
        for length, closing in control.promise_close.items()
    ]
    script = follow(
        promise,
        *chunks,
        vocabulary_size=decoder.engine.vocabulary_size,
        otherwise=min(decoder.vocabulary.eos_ids),
    )
    found = parts_of("kept_lengths.py")["forced"](
        with_engine(decoder, script), Question("q", "?"), 60
    )
    assert found == {20: 2, 30: 3, 40: 4, 60: 6, 100: 10}


def test_of_the_first_promise_alone_the_closing_is_forced() -> None:
    forcing = parts_of("kept_lengths.py")["Forcing"]
    wanted = iter((5, 7, 5, 7))
    model = SimpleNamespace(choose=lambda *_: Choice(next(wanted), intervened=False))
    chooser = forcing(model, [7, 8, 9], 9)
    assert [chooser.sample(0, index, None, None).token for index in range(4)] == [5, 9, 5, 7]
