"""`pasta eval generate` on a tiny model: what it writes, resumes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pasta_decoding.evaluation.records import RunFolder, read_records
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta, interrupted

PROMPTS = ["Hello", "Two cities?", "x" * 20_000]


@pytest.fixture
def generate(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> Callable[..., Outcome]:
    """Return a function that answers three prompts, the last of which is too long."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in PROMPTS))

    def run(*flags: object, methods: tuple[str, ...] = ("pasta", "sequential")) -> Outcome:
        where = ["--prompts", prompts, "--out", tmp_path / "out", "--model", tiny_checkpoint.base]
        chosen = [
            part
            for name in methods
            for part in ("--method", name if "=" in name else f"{name}={tiny_checkpoint.adapter}")
        ]
        return pasta("eval", "generate", *where, *chosen, "--max-tokens", "60", *flags)

    return run


def test_every_method_gets_a_folder_and_failures_are_records(
    generate: Callable[..., Outcome], tmp_path: Path
) -> None:
    methods = (
        "pasta", "sequential", "apar", "sot", "sot=none", "sequential=none", "lookup=none",
    )  # fmt: skip
    found = generate(methods=methods)
    assert found.status == 0
    labels = [
        "pasta-adapter",
        "sequential-adapter",
        "apar-adapter",
        "sot-adapter",
        "sot-none",
        "sequential-none",
        "lookup-none",
    ]
    assert [line.split(":")[0] for line in found.out.splitlines()] == labels
    assert all(": 3 prompts, 1 failed, " in line for line in found.out.splitlines())
    assert f"failed: {'x' * 60!r}: the prompt is too long: 20000 characters" in found.err
    for label in labels:
        records = read_records(tmp_path / "out" / label / "records.jsonl")
        assert sorted(record.instruction for record in records) == sorted(PROMPTS)
        outputs = json.loads((tmp_path / "out" / label / "model_outputs.json").read_text())
        assert [one["instruction"] for one in outputs] == PROMPTS
        assert {one["generator"] for one in outputs} == {label}
        assert outputs[2]["output"] == ""
    run = json.loads((tmp_path / "out" / "sot-none" / "run.json").read_text())
    assert run["method"] == "sot"
    assert run["adapter"] is None
    assert (run["max_concurrency"], run["timing"]) == (16, False)
    assert run["engine"] in {"fast", "torch"}, "what auto takes depends on the machine"
    assert run["prompts"]["number"] == 3
    run = json.loads((tmp_path / "out" / "pasta-adapter" / "run.json").read_text())
    assert len(run["adapter"]["sha256"]) == 16


def test_the_methods_differ_in_what_they_may_write(
    generate: Callable[..., Outcome], tmp_path: Path
) -> None:
    assert generate(methods=("pasta", "sequential")).status == 0
    chunks = {
        label: sum(one.chunks for one in read_records(tmp_path / "out" / label / "records.jsonl"))
        for label in ("pasta-adapter", "sequential-adapter")
    }
    assert chunks["pasta-adapter"] >= 2
    assert chunks["sequential-adapter"] == 0


def test_an_interrupted_run_goes_on_where_it_was(
    generate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-concurrency", "1")
    records = tmp_path / "out" / "pasta-adapter" / "records.jsonl"
    append = RunFolder.append
    with monkeypatch.context() as context:

        def once(folder: RunFolder, record: object) -> None:
            append(folder, record)  # type: ignore[arg-type]
            context.setattr(RunFolder, "append", interrupted)

        context.setattr(RunFolder, "append", once)
        assert generate(*flags).status == 130
    before = records.read_text()
    assert len(before.splitlines()) == 1
    assert not (tmp_path / "out" / "pasta-adapter" / "model_outputs.json").exists()
    assert generate(*flags).status == 0
    assert records.read_text().startswith(before)
    assert len(records.read_text().splitlines()) == 3
    again = records.read_text()
    assert generate(*flags).status == 0
    assert records.read_text() == again
    changed = generate(*flags, "--max-seconds", "9")
    assert changed.status == 2
    assert changed.err.strip() == (
        f"pasta: {tmp_path / 'out' / 'pasta-adapter'} was begun with other settings: "
        "max_seconds (600.0 -> 9.0)\nGive the settings it was begun with, or another --out."
    )


def test_timing_keeps_the_seconds_of_every_turn(
    generate: Callable[..., Outcome], tmp_path: Path
) -> None:
    assert generate("--timing", "--repeats", "2", "--limit", "1").status == 0
    for label in ("pasta-adapter", "sequential-adapter"):
        [record] = read_records(tmp_path / "out" / label / "records.jsonl")
        assert record.turns is not None
        assert len(record.repeats) == 2
        assert record.seconds == sum(record.repeats) / 2
        assert record.first_token_s is not None
        assert 0 < record.first_token_s < max(record.repeats)
        run = json.loads((tmp_path / "out" / label / "run.json").read_text())
        assert (run["timing"], run["repeats"], run["max_concurrency"]) == (True, 2, 1)


@pytest.mark.parametrize(
    ("flags", "methods", "message"),
    [
        (
            ["--timing", "--max-concurrency", "4"],
            ("pasta",),
            "--timing answers one prompt at a time",
        ),
        (["--repeats", "2"], ("pasta",), "--repeats is for --timing"),
        ([], ("fast=a",), "--method 'fast=a' is none of sequential, pasta, sot, apar, "),
        ([], ("pasta=",), "--method 'pasta=' is none of sequential, pasta, sot, apar, "),
        ([], ("pasta=none",), "pasta needs an adapter"),
        ([], ("pasta", "pasta"), "--method is given twice for the folder 'pasta-adapter'"),
        ([], ("pasta=nowhere",), "no adapter 'nowhere'"),
        (["--model", "a.gguf"], ("pasta",), "--model names a GGUF file"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    flags: list[str], methods: tuple[str, ...], message: str, generate: Callable[..., Outcome]
) -> None:
    found = generate(*flags, methods=methods)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {message}")


def test_without_an_adapter_the_base_model_answers_sequentially(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint
) -> None:
    where = ["--model", tiny_checkpoint.base, "--adapter", "none", "--max-tokens", "40"]
    found = pasta("run", "Two cities?", *where, "--json")
    assert found.status == 0
    assert found.object["critical_path"] == 40
    assert "<promise" not in found.object["annotated"]


def test_lookup_is_timed_and_reported_against_transformers_own_generate(
    generate: Callable[..., Outcome], pasta: Pasta, tmp_path: Path
) -> None:
    methods = ("hf=none", "lookup=none")
    assert generate("--timing", "--repeats", "1", "--limit", "2", methods=methods).status == 0
    settings = [
        json.loads((tmp_path / "out" / label / "run.json").read_text())
        for label in ("hf-none", "lookup-none")
    ]
    assert [(one["method"], one["engine"]) for one in settings] == [
        ("hf", "transformers"),
        ("lookup", "transformers"),
    ]
    assert pasta("eval", "report", tmp_path / "out", "-o", tmp_path / "report").status == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["runs"]["lookup-none"]["speedups"]["wall_clock"]["value"] > 0


def test_answers_may_be_sampled_and_follow_from_the_seed(
    generate: Callable[..., Outcome], tmp_path: Path
) -> None:
    def texts(out: str, *flags: str) -> list[dict[str, str]]:
        methods = ("pasta", "sot", "lookup")
        exact = ("--dtype", "float32", "--temperature", "1")
        found = generate("--out", tmp_path / out, *exact, *flags, methods=methods)
        assert found.status == 0, found.err
        return [
            {record.instruction: record.text for record in read_records(path)}
            for path in sorted((tmp_path / out).glob("*/records.jsonl"))
        ]

    first = texts("first")
    assert first == texts("again", "--max-concurrency", "1")
    other = texts("other", "--seed", "7", "--top-p", "0.9")
    assert all(a != b for a, b in zip(first, other, strict=True))
    run = json.loads((tmp_path / "other" / "pasta-adapter" / "run.json").read_text())
    assert run["sampling"] == {"temperature": 1.0, "top_p": 0.9, "seed": 7}


def test_what_cannot_be_sampled_is_refused(generate: Callable[..., Outcome]) -> None:
    found = generate("--temperature", "1", "--top-p", "2")
    assert found.status == 2
    assert "top_p is 2.0, not a number above 0 and at most 1" in found.err
