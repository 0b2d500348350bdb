"""`--engine remote`: what a command says is what the same checkpoint would say in this process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pasta_decoding.evaluation.records import read_records
from pasta_decoding.models.catalog import WholeModel
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta
from tests.remote.fake import Fake, by_model, serving


@pytest.fixture(scope="module")
def merged(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the merged checkpoint, which says that it knows both joins."""
    folder = tmp_path_factory.mktemp("merged") / "tiny"
    export_hf(load_model(tiny_checkpoint.source), folder)
    record = json.loads((folder / "pasta.json").read_text())
    (folder / "pasta.json").write_text(json.dumps(record | {"joins": ["kv", "text"]}))
    return folder


@pytest.fixture(scope="module")
def fake(merged: Path) -> Iterator[Fake]:
    """Serve the merged checkpoint."""
    loaded = load_model(WholeModel(merged))
    model = loaded.model
    with serving(Fake(by_model(model), model.config.vocab_size, min(loaded.eos_ids))) as fake:
        yield fake


@pytest.fixture
def there(fake: Fake) -> list[str]:
    return ["--engine", "remote", "--base-url", fake.url]


@pytest.fixture
def ask(pasta: Pasta, merged: Path) -> Pasta:
    return lambda *flags: pasta("run", "Hello", "--adapter", merged, "--max-tokens", "20", *flags)


def test_what_makes_no_sense_there_is_refused(ask: Pasta, there: list[str]) -> None:
    for arguments, message in (
        (["--join", "kv"], "servers of completions cannot join keys, only text"),
        (["--base-url", "localhost:8000"], "'localhost:8000' is no base URL"),
        (["--trace", "trace.json"], "--trace needs an engine of this process"),
    ):
        outcome = ask(*there, *arguments)
        assert (outcome.status, message in outcome.err) == (2, True)


def test_a_server_that_asks_for_a_key_gets_it(
    ask: Pasta, there: list[str], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "key", "sesame")
    outcome = ask(*there)
    assert (outcome.status, "refuses the key (401); set PASTA_REMOTE_KEY" in outcome.err) == (
        2,
        True,
    )
    monkeypatch.setenv("PASTA_REMOTE_KEY", "sesame")
    assert ask(*there, "--json").object["sent"]["requests"]


def test_prompts_are_evaluated_over_servers_several_at_a_time(
    pasta: Pasta, merged: Path, fake: Fake, there: list[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    method = ["--method", f"sequential={merged}"]
    prompts.write_text("".join(json.dumps({"instruction": f"{n}?"}) + "\n" for n in range(3)))
    fake.max_live = 0
    answers_by_width = list[set[object]]()
    for out, where in (("here", ["--engine", "torch", "--dtype", "float32"]), ("there", there)):
        flags = ["--prompts", prompts, "--out", tmp_path / out, "--max-tokens", 20]
        assert pasta("eval", "generate", *flags, *method, *where).status == 0
        records = read_records(tmp_path / out / "sequential-tiny" / "records.jsonl")
        answers_by_width.append(
            {(record.id, record.text, record.critical_path, record.error) for record in records}
        )
    assert (answers_by_width[0], fake.max_live) == (answers_by_width[1], 3)
