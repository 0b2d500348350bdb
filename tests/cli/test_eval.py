"""`pasta eval generate` on a tiny model: what it writes, resumes and refuses."""

import json
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.opening import decoder_for
from pasta_decoding.evaluation.records import Record, read_records
from pasta_decoding.files import sha256
from pasta_decoding.scheduling.decoder import Decoder
from tests.checkpoint import BASE_NAME, TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta

PROMPTS = ["Hello", "Two cities?", "x" * 20_000]
REMOTE = "--base-url http://127.0.0.1:9/v1"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def generate(pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, out: Path) -> Pasta:
    """Return a function that answers three prompts, the last of which is too long."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in PROMPTS))

    def run(*flags: object, methods: tuple[str, ...] = ("pasta", "sequential")) -> Outcome:
        where = ["--prompts", prompts, "--out", out, "--model", tiny_checkpoint.base]
        chosen = [
            part
            for name in methods
            for part in ("--method", name if "=" in name else f"{name}={tiny_checkpoint.adapter}")
        ]
        return pasta("eval", "generate", *where, *chosen, "--max-tokens", "60", *flags)

    return run


def settings(folder: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return contents


def records(folder: Path) -> list[Record]:
    return read_records(folder / "records.jsonl")


def test_every_method_gets_a_folder_and_failures_are_records(generate: Pasta, out: Path) -> None:
    methods = ("pasta", "sequential", "apar", "sot=none", "lookup=none")
    outcome = generate(methods=methods)
    assert outcome.status == 0
    labels = [
        "pasta-adapter", "sequential-adapter", "apar-adapter", "sot-none", "lookup-none",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in outcome.out.splitlines()] == labels
    assert all(": 3 prompts, 1 failed, " in line for line in outcome.out.splitlines())
    assert f"failed: {'x' * 60!r}: the prompt is too long: 20000 characters" in outcome.err
    for label in labels:
        assert sorted(record.instruction for record in records(out / label)) == sorted(PROMPTS)
        outputs = json.loads((out / label / "model_outputs.json").read_text())
        assert [output["instruction"] for output in outputs] == PROMPTS
        assert ({output["generator"] for output in outputs}, outputs[2]["output"]) == ({label}, "")
    run = settings(out / "sot-none")
    assert (run["method"], run["adapter"], run["prompts"]["number"]) == ("sot", None, 3)
    assert (run["max_concurrency"], run["repeats"], run["sampling"]) == (16, None, "greedy")
    assert run["engine"] in {"fast", "torch"}, "what auto takes depends on the machine"
    assert len(settings(out / "pasta-adapter")["adapter"]["sha256"]) == 16
    assert sum(record.chunks for record in records(out / "pasta-adapter")) >= 2
    assert sum(record.chunks for record in records(out / "sequential-adapter")) == 0


def test_a_whole_model_is_a_method_and_one_model_at_a_time_is_in_memory(
    generate: Pasta, pasta: Pasta, tiny_checkpoint: TinyCheckpoint, out: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    opened: list[Any] = []

    def opening(engine: EngineConfig) -> Decoder:
        assert not [reference for reference in opened if reference() is not None]
        decoder: Any = decoder_for(engine)
        opened.append(weakref.ref(decoder.engine))
        return decoder

    for command in ("eval", "run"):
        module = import_module(f"pasta_decoding.cli.{command}")
        monkeypatch.setattr(module, "decoder_for", opening)
    gguf = tmp_path / "tiny.gguf"
    base = ["--model", tiny_checkpoint.base]
    made = pasta("export", tiny_checkpoint.adapter, *base, "-o", gguf)
    assert (made.status, made.out) == (0, f"{gguf}\n")
    outcome = generate("--limit", "1", methods=(f"pasta={gguf}", "sequential=none", "hf=none"))
    assert (outcome.status, len(opened)) == (0, 3)
    run = settings(out / "pasta-tiny.gguf")
    assert (run["model"], run["adapter"]["sha256"]) == (BASE_NAME, sha256(gguf)[:16])
    assert [record.error for record in records(out / "pasta-tiny.gguf")] == [None]
    adapter = ["--adapter", tiny_checkpoint.adapter, "--max-tokens", 8]
    assert pasta("compare", "Hello", *base, *adapter, "--engine", "torch").status == 0


def test_flags_that_mean_nothing_are_refused(generate: Pasta, out: Path) -> None:
    for flags, methods, message in (
        ("--timing --max-concurrency 4", "pasta", "--timing answers one prompt at a time"),
        ("--max-concurrency 0", "pasta", "Invalid value for '--max-concurrency': "),
        ("", "pasta=", "--method 'pasta=' is none of sequential, pasta, sot, apar, "),
        ("", "pasta=none", "pasta needs an adapter"),
        ("", "pasta pasta", "--method is given twice for the folder 'pasta-adapter'"),
        (f"{REMOTE} --timing", "pasta", "--timing is for an engine in this process"),
        (REMOTE, "lookup", "--method lookup works in this process, not on servers"),
        (REMOTE, "pasta sequential=other", "the servers have one checkpoint, and methods differ"),
    ):
        outcome = generate(*flags.split(), methods=tuple(methods.split()))
        assert (outcome.status, list(out.glob("*"))) == (2, [])
        assert outcome.err.startswith(f"pasta: {message}")


def test_lookup_is_timed_and_reported_against_transformers_own_generate(
    generate: Pasta, pasta: Pasta, out: Path
) -> None:
    assert generate("--timing", "--limit", "1", methods=("hf=none", "lookup=none")).status == 0
    for label in ("hf-none", "lookup-none"):
        run = settings(out / label)
        assert (run["method"], run["engine"]) == (label.split("-")[0], "transformers")
        assert (run["repeats"], run["max_concurrency"]) == (3, 1)
        [record] = records(out / label)
        assert record.seconds == sorted(record.repeats)[1]
    assert pasta("eval", "report", out, "-o", out / "report").status == 0
    report = json.loads((out / "report" / "report.json").read_text())
    assert report["runs"]["lookup-none"]["speedups"]["wall_clock"]["value"] > 0
