"""`--engine remote`: what a command says is what the same checkpoint would say in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta
from tests.remote.fake import Fake, by_model, serving

Ask = Callable[..., Outcome]
HABITS = ["Name a habit.", "Name another one.", "And a third one?"]


@pytest.fixture(scope="module")
def merged(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the merged checkpoint, which says that it knows both joins."""
    folder = tmp_path_factory.mktemp("merged") / "tiny"
    export_hf(load_model(tiny_checkpoint.base, tiny_checkpoint.adapter), folder)
    record = json.loads((folder / "pasta.json").read_text())
    (folder / "pasta.json").write_text(json.dumps(record | {"joins": ["kv", "text"]}))
    return folder


@pytest.fixture(scope="module")
def fake(merged: Path) -> Iterator[Fake]:
    """Serve the merged checkpoint."""
    loaded = load_model(merged, merged)
    model = loaded.model
    with serving(Fake(by_model(model), model.config.vocab_size, min(loaded.eos_ids))) as fake:
        yield fake


@pytest.fixture
def ask(pasta: Pasta, merged: Path, fake: Fake) -> Ask:
    """Return a function that runs `pasta run Hello` at the server, or elsewhere."""

    def run(*arguments: object, engine: str = "remote", adapter: Path | str = merged) -> Outcome:
        where = ["--base-url", fake.url] if engine == "remote" else ["--dtype", "float32"]
        asked = ["--adapter", adapter, "--max-tokens", "20", "--engine", engine, *where]
        return pasta("run", "Hello", *asked, *arguments)

    return run


def test_a_sequential_answer_is_the_torch_engines_however_it_is_shown(ask: Ask) -> None:
    ours = ask("--sequential", "--json").object
    theirs = ask("--sequential", "--json", engine="torch").object
    assert ours["text"] == theirs["text"] != ""
    assert ours["critical_path"] == theirs["critical_path"]
    assert ours["sent"]["requests"] == 1
    assert ask("--sequential", "--show").out == f"{ours['text']}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--join", "kv"], "servers of completions cannot join keys, only text"),
        (["--base-url", "localhost:8000"], "'localhost:8000' is no base URL"),
        (["--trace", "trace.json"], "--trace needs an engine of this process"),
    ],
)
def test_what_makes_no_sense_there_is_refused(arguments: list[str], said: str, ask: Ask) -> None:
    found = ask(*arguments)
    assert (found.status, said in found.err) == (2, True)


def test_a_server_that_asks_for_a_key_gets_it(
    ask: Ask, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "key", "sesame")
    found = ask("--sequential")
    assert (found.status, "refuses the key (401); set PASTA_REMOTE_KEY" in found.err) == (2, True)
    monkeypatch.setenv("PASTA_REMOTE_KEY", "sesame")
    assert ask("--sequential").status == 0


# Evaluation


@pytest.fixture
def generate(pasta: Pasta, merged: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function that answers HABITS by `pasta eval generate`, into a folder."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in HABITS))

    def run(out: str, *arguments: object) -> Outcome:
        where = ["--prompts", prompts, "--out", tmp_path / out, "--max-tokens", 20]
        return pasta("eval", "generate", *where, "--method", f"sequential={merged}", *arguments)

    return run


def records_in(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "sequential-tiny" / "records.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda one: str(one["id"]))


def test_prompts_are_evaluated_over_servers_several_at_a_time(
    generate: Callable[..., Outcome], fake: Fake, tmp_path: Path
) -> None:
    served = ["--engine", "remote", "--base-url", fake.url]
    assert generate("here", "--engine", "torch", "--dtype", "float32").status == 0
    fake.most_live = 0
    assert generate("there", *served).status == 0
    assert fake.most_live >= len(HABITS)
    ours, theirs = records_in(tmp_path / "there"), records_in(tmp_path / "here")
    told = ("id", "text", "plain_tokens", "critical_path", "error")
    assert [[one[key] for key in told] for one in ours] == [
        [one[key] for key in told] for one in theirs
    ]
    assert all(one["prompt_tokens"] > 0 for one in ours)
    asked = len(fake.bodies)
    assert generate("there", *served).status == 0  # it goes on, and nothing is left to do
    assert len(fake.bodies) == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timing"], "--timing is for an engine in this process"),
        (["--method", "lookup"], "--method lookup works in this process, not on servers"),
        (["--method", "sot"], "--method sot works in this process, not on servers"),
        (["--method", "pasta"], "the servers have one checkpoint, and methods differ in theirs"),
    ],
)
def test_what_servers_cannot_do_in_an_evaluation_is_refused(
    arguments: list[str],
    message: str,
    generate: Callable[..., Outcome],
    fake: Fake,
    tmp_path: Path,
) -> None:
    found = generate("out", "--engine", "remote", "--base-url", fake.url, *arguments)
    assert (found.status, found.err.startswith(f"pasta: {message}")) == (2, True)
    assert not (tmp_path / "out").exists()
