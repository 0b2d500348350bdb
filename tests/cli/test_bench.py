"""`pasta bench answers` on a tiny model: every promised figure, and runs that can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.evaluation.machine import machine
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta

PROMISED = {
    "answers",
    "with_promise",
    "own_speedup",
    "own_speedup_with_promise",
    "replay_speedup",
    "interpreter_efficiency",
    "interventions",
    "repeated_chunks",
    "hit_limit",
    "plain_tokens_mean",
    "sequential_tokens_mean",
    "malformed",
    "failures",
    "machine",
    "commit",
}
PROMPTS = ["Hello", "Two cities?", "x" * 20_000]

Bench = Callable[..., Outcome]


@pytest.fixture
def bench(pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Bench:
    """Return a function that benches three prompts, the last of which is too long."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in PROMPTS))

    def run(*arguments: object, adapter: Path = tiny_checkpoint.adapter) -> Outcome:
        where = ["--model", tiny_checkpoint.base, "--adapter", adapter]
        limits = ["--max-tokens", "48", "--timed", "1"]
        return pasta("bench", "answers", "--prompts", prompts, *where, *limits, *arguments)

    return run


def test_every_promised_figure_is_there(bench: Bench) -> None:
    outcome = bench("--json")
    found = outcome.object
    assert outcome.status == 0
    assert set(found) >= PROMISED
    assert (found["answers"], found["failures"], found["malformed"]) == (3, 1, 0)
    assert found["with_promise"] > 0
    assert found["chunks"] >= 2
    assert found["timed"] == 1
    for name in ("own_speedup", "replay_speedup", "interpreter_efficiency"):
        assert found[name] > 0, name
    assert found["machine"] == machine()


def test_promises_of_a_checkpoint_without_topics_are_not_malformed(
    bench: Bench, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_checkpoint.adapter, tmp_path / "adapter") / "pasta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"topic": "none"}))
    found = bench("--json", adapter=path.parent).object
    assert found["with_promise"] > 0
    assert (found["failures"], found["malformed"]) == (1, 0)


def test_for_people_the_figures_are_lines_and_failures_are_named(bench: Bench) -> None:
    found = bench("--limit", "3")
    assert found.status == 0
    assert "answers                    3\n" in found.out
    assert "failures                   1\n" in found.out
    expected = f"failed: {'x' * 60!r}: the prompt is too long: 20000 characters, at most 2000 "
    assert expected in found.err


def interrupt_on(call: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with Ctrl-C in its place from this call on."""
    calls = 0

    def interrupting(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise KeyboardInterrupt
        return forward(*arguments, **settings)

    return interrupting


def test_an_interrupted_bench_keeps_whole_records_and_goes_on_behind_them(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    records = tmp_path / "records.jsonl"
    with monkeypatch.context() as context:
        # The first prompt takes about 150 forward passes, its timing a few dozen more.
        forward = interrupt_on(5, LlamaForCausalLM.forward)
        assert bench("--records", records, "--limit", "1", "--timed", "0").status == 0
        context.setattr(LlamaForCausalLM, "forward", forward)
        assert bench("--records", records).status == 130
    before = records.read_text()
    assert [
        json.loads(line)["record"]["instruction"] for line in before.splitlines()[1:]
    ] == PROMPTS[:1]
    resumed = bench("--records", records, "--json")
    assert resumed.object["answers"] == 3
    assert records.read_text().startswith(before)
    assert len(records.read_text().splitlines()) == 1 + 3
    other = bench("--records", records, "--max-tokens", "7")
    assert (other.status, "was begun with other settings: max_tokens" in other.err) == (2, True)
    again = bench("--records", records, "--json")
    assert again.out == resumed.out


@pytest.mark.parametrize(
    "line", ["{}", '{"record": {"id": "1", "instruction": "Hello"}, "timing": null, "pace": 1}']
)
def test_a_records_file_of_something_else_is_refused(
    line: str, bench: Bench, tmp_path: Path
) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text(line + "\n")
    found = bench("--records", records)
    assert found.status == 2
    assert f"pasta: {records}:1: not a record of this bench: " in found.err
    assert found.err.endswith("Choose another --records file.\n")
    assert records.read_text() == line + "\n"


def test_a_records_file_that_cannot_be_written_is_named(bench: Bench, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    found = bench("--records", file / "records.jsonl")
    assert found.status == 2
    assert found.err.endswith(f"pasta: {file}: File exists\n")


def test_a_broken_line_of_the_prompts_is_named(pasta: Pasta, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"instruction": "Hello"}\n{"prompt": "Hello"}\n')
    found = pasta("bench", "answers", "--prompts", prompts)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {prompts}:2: 'instruction' is missing\n")
