"""The benchmarks run, and their lines say what was measured. How fast is not a test's business."""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.scheduling.loop import EngineLoop
from tests.checkpoint import TinyCheckpoint

BENCH = Path(__file__).parents[2] / "bench"


def lines_of(script: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a benchmark, and return its lines, which do not go to bench/results."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        run(script, *arguments)
    lines = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert all({"benchmark", "machine", "commit", "date"} <= line.keys() for line in lines)
    return lines


def run(script: str, *arguments: object) -> None:
    """Run a benchmark in this process: one of its own would import torch again."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("BENCH_DRY", "1")
        here.syspath_prepend(BENCH)
        here.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(BENCH / script), run_name="__main__")


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: TinyCheckpoint) -> list[object]:
    return ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter]


def test_a_step_has_a_line_for_each_number_of_threads_and_of_requests(tiny: list[object]) -> None:
    sizes = ("--widths", 1, 2, "--repeats", 1, "--slots", 16, "--ctx", 512)
    lines = lines_of("width_cost.py", *tiny, "--engines", "torch:float32", *sizes)
    shapes = [(line.get("threads"), line.get("requests")) for line in lines]
    assert shapes == [(1, None), (2, None), (None, 1), (None, 2)]


def test_steps_of_a_gpu_are_listed_with_those_of_generate() -> None:
    sizes = ("--device", "cpu", "--shape", "tiny", "--slots", 8, "--rows", 1)
    ours, *theirs = lines_of("gpu_step.py", *sizes)
    assert all(ours[f"{step}, 8 slots"]["ms"] > 0 for step in ("1 x 1", "1 x 8", "64 x 4"))
    assert [line["generate"] for line in theirs] == ["1 x 1, 8 slots", "32 x 1, 8 slots"]


@pytest.mark.llama
def test_prompt_lookup_writes_what_the_loop_writes(tiny: list[object]) -> None:
    sizes = ("--clients", 1, 2, "--prompts", 2, "--max-tokens", 24, "--drafts", 1, 4)
    lines = lines_of("peers.py", *tiny, "--engines", "llama:F32", "--threads", 1, *sizes, "--json")
    lookups = [line for line in lines if line["peer"].startswith("prompt lookup")]
    assert [line["clients"] for line in lookups] == [1, 1, 2, 2]
    for line in lookups:
        assert line["times_as_fast_as"]["llama.cpp loop, llama F32"]["same"] == 1
        assert line["tokens_per_pass"] > line["clients"]


@pytest.mark.parametrize("replay", [False, True])
def test_peers_take_turns_and_go_on_where_they_were(
    tiny: list[object], replay: bool, tmp_path: Path
) -> None:
    chunks = "".join(f'<promise topic="{n}" tokens="20"/><async>Part {n}.</async>' for n in "ab")
    rows = [{"instruction": f"{n}?", "response": f"Yes. {chunks}"} for n in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    forced = ("--replay", tmp_path / "rows.jsonl", "--chunks", 2) if replay else ()
    sizes = ("--clients", 1, 2, "--prompts", 2, "--max-tokens", 4, "--out", tmp_path / "turns")
    options = (*tiny, "--engines", "torch:float32", *sizes, *forced)
    lines = lines_of("peers.py", *options, "--json")
    peers = ["pasta sequential", "pasta parallel", "transformers generate"]
    assert [(line["clients"], line["turns"], line["peer"]) for line in lines] == [
        (clients, turns, peer) for clients, turns in ((1, 2), (2, 1)) for peer in peers
    ]
    assert lines == lines_of("peers.py", *options, "--json")  # nothing is timed again
    with pytest.raises(SystemExit, match="of a run with other options"):
        run("peers.py", *options, "--max-tokens", 5)


@pytest.mark.parametrize("door", [(), ("--http",)])
def test_a_soak_finds_the_answers_that_are_decoded_alone(
    tiny: list[object], door: tuple[str, ...]
) -> None:
    sizes = ("--clients", 3, "--answers", 4, "--max-tokens", 8, "--pause", 0.01, "--requests", 40)
    (line,) = lines_of("soak.py", *tiny, "--engines", "torch:float32", *sizes, *door)
    assert line["ends"].keys() == {"answered", "left"}
    assert sum(line["ends"].values()) == 40
    assert (line["differences"], line["slots_held"]) == ([], 0)


def test_a_soak_lists_what_differs_with_the_gap_of_its_first_token(
    tiny: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's thread samples with another seed."""
    submit = EngineLoop.submit

    def submit_reseeded(loop: EngineLoop, request: Request, *arguments: Any) -> Any:
        reseeded = replace(request, sampler=Sampler(SamplingParams(1, seed=9)))
        return submit(loop, reseeded, *arguments)

    monkeypatch.setattr(EngineLoop, "submit", submit_reseeded)
    sizes = ("--clients", 2, "--answers", 2, "--max-tokens", 8, "--pause", 0.01, "--requests", 9)
    with pytest.raises(SystemExit, match="not sound: torch:float32"):
        run("soak.py", *tiny, "--engines", "torch:float32", *sizes)
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert differences
    for difference in differences:
        assert 0 < difference["gap"] < 50
        assert difference["thread"] == 0
