"""`--engine remote`: what a command says is what the same checkpoint would say in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pasta_decoding.lang.check import check
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta
from tests.remote.fake import Fake, by_model, refusal, serving, until

Ask = Callable[..., Outcome]


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
    script = by_model(model)
    with serving(Fake(script, model.config.vocab_size, min(loaded.eos_ids))) as fake:
        yield fake


@pytest.fixture
def ask(pasta: Pasta, merged: Path, fake: Fake) -> Ask:
    """Return a function that runs `pasta run Hello` at the server, or elsewhere."""

    def run(*arguments: object, engine: str = "remote", adapter: Path | str = merged) -> Outcome:
        where = ["--base-url", fake.url] if engine == "remote" else ["--dtype", "float32"]
        asked = ["--adapter", adapter, "--max-tokens", "30", "--engine", engine, *where]
        return pasta("run", "Hello", *asked, *arguments)

    return run


def test_a_sequential_answer_is_the_torch_engines(ask: Ask) -> None:
    ours = ask("--sequential", "--json").object
    theirs = ask("--sequential", "--json", engine="torch").object
    assert ours["text"] == theirs["text"] != ""
    assert ours["critical_path"] == theirs["critical_path"]
    assert ours["sent"]["requests"] == 1


def test_a_parallel_answer_is_well_formed_and_says_what_it_asked_for(ask: Ask) -> None:
    found = ask("--json").object
    assert check(found["annotated"]) == []
    assert found["sent"]["requests"] >= found["threads"]
    assert found["sent"]["prompt_tokens"] > 0


def test_the_stream_and_the_drawing_say_the_same(ask: Ask) -> None:
    text = ask("--sequential", "--json").object["text"]
    assert ask("--sequential").out == f"{text}\n"
    assert ask("--sequential", "--show").out == f"{text}\n"


def test_the_base_model_alone_is_asked_sequentially(
    ask: Ask, fake: Fake, tiny_checkpoint: TinyCheckpoint
) -> None:
    outcome = ask("--model", tiny_checkpoint.base, "--json", adapter="none")
    assert outcome.object["threads"] == 1
    assert len(fake.bodies[-1]["logit_bias"]) > 0


def test_an_adapter_that_was_not_trained_for_text_is_refused_unless_one_insists(
    ask: Ask, tiny_checkpoint: TinyCheckpoint
) -> None:
    where = ["--model", tiny_checkpoint.base]
    assert ask(*where, adapter=tiny_checkpoint.adapter).complaint == (
        2,
        "pasta: the checkpoint was trained for the joins kv, not 'text'",
        "Use another adapter, or --join text to decode with this one all the same.",
    )
    insisting = ask(*where, "--join", "text", "--json", adapter=tiny_checkpoint.adapter)
    assert insisting.status == 0
    assert "was not trained for the join text" in insisting.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--join", "kv"], "servers of completions cannot join keys, only text"),
        (["--base-url", "localhost:8000"], "'localhost:8000' is no base URL"),
        (["--trace", "trace.json"], "--trace needs an engine of this process"),
        (["--base-url", "http://127.0.0.1:9/v1"], "no server is ready: "),
    ],
)
def test_what_makes_no_sense_there_is_refused(
    arguments: list[str], said: str, pasta: Pasta, merged: Path, fake: Fake
) -> None:
    url = [] if "http://127.0.0.1:9/v1" in arguments else ["--base-url", fake.url]
    found = pasta("run", "Hello", "--adapter", merged, "--engine", "remote", *url, *arguments)
    assert found.status == 2
    assert said in found.err


def test_a_server_that_asks_for_a_key_gets_it(
    ask: Ask, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "key", "sesame")
    found = ask("--sequential")
    assert (found.status, "refuses the key (401)" in found.err) == (2, True)
    assert ask("--sequential", "--remote-key", "sesame").status == 0
    monkeypatch.setenv("PASTA_REMOTE_KEY", "sesame")
    assert ask("--sequential").status == 0


def test_serve_answers_by_way_of_another_server(merged: Path, fake: Fake) -> None:
    where = ["--adapter", str(merged), "--engine", "remote", "--base-url", fake.url]
    command = [sys.executable, "-m", "pasta_decoding", "serve", "--port", "0", *where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stderr is not None
        said = iter(server.stderr.readline, "")
        address = r"tiny at (http://127\.0\.0\.1:\d+)\n"
        found = next(filter(None, (re.fullmatch(address, line) for line in said)), None)
        if found is None:
            server.kill()
            pytest.fail("the server did not say where it is")
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=5)
        got = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert got.usage is not None
        assert got.usage.completion_tokens <= 5
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
    until(lambda: fake.live == 0)


# Evaluation

HABITS = ["Name a habit.", "Name another one.", "And a third one?", "Why those?"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"instruction": text}) + "\n" for text in HABITS]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def served(fake: Fake) -> list[object]:
    return ["--engine", "remote", "--base-url", fake.url, "--max-tokens", 40]


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_methods_are_evaluated_over_servers_several_answers_at_a_time(
    pasta: Pasta, merged: Path, fake: Fake, served: list[object], prompts: Path, tmp_path: Path
) -> None:
    generate = ["eval", "generate", "--prompts", prompts, "--method", f"sequential={merged}"]
    here = ["--engine", "torch", "--dtype", "float32", "--max-tokens", 40]
    assert pasta(*generate, "--out", tmp_path / "here", *here).status == 0
    fake.most_live = 0
    both = [*generate, "--method", f"pasta={merged}", "--out", tmp_path / "there", *served]
    assert pasta(*both).status == 0
    assert fake.most_live >= len(HABITS)
    ours = records_in(tmp_path / "there" / f"sequential-{merged.name}")
    theirs = records_in(tmp_path / "here" / f"sequential-{merged.name}")
    told = ("id", "text", "plain_tokens", "critical_path", "error")
    by_id = sorted(({key: one[key] for key in told} for one in ours), key=lambda one: one["id"])
    expected = sorted(({key: one[key] for key in told} for one in theirs), key=lambda o: o["id"])
    assert by_id == expected
    assert all(one["prompt_tokens"] > 0 for one in ours)
    asked = len(fake.bodies)
    assert pasta(*both).status == 0  # it goes on, and nothing is left to do
    assert len(fake.bodies) == asked


def test_an_answer_that_servers_fail_in_is_a_record_of_that(
    pasta: Pasta,
    merged: Path,
    fake: Fake,
    served: list[object],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(body: dict[str, Any], pieces: AsyncIterator[bytes]) -> Any:
        unlucky = bytes(HABITS[1], "ascii")
        text = bytes(token for token in body["prompt"] if token < 256)
        return refusal(400, "not this one") if unlucky_ids(unlucky) in text else pieces

    def unlucky_ids(text: bytes) -> bytes:
        tokenizer = load_model(merged, merged).tokenizer
        return bytes(tokenizer.encode(text.decode(), add_special_tokens=False))

    monkeypatch.setattr(fake, "mischief", refuse)
    generate = ["eval", "generate", "--prompts", prompts, "--method", f"pasta={merged}"]
    found = pasta(*generate, "--out", tmp_path, *served)
    assert "4 prompts, 1 failed" in found.out
    [failed] = [one for one in records_in(tmp_path / f"pasta-{merged.name}") if one["error"]]
    assert failed["instruction"] == HABITS[1]
    assert "not this one" in failed["error"]


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
    pasta: Pasta,
    merged: Path,
    served: list[object],
    prompts: Path,
    tmp_path: Path,
    arguments: list[object],
    message: str,
) -> None:
    generate = ["eval", "generate", "--prompts", prompts, "--method", f"sequential={merged}"]
    found = pasta(*generate, "--out", tmp_path / "out", *served, *arguments)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {message}")
    assert not (tmp_path / "out").exists()


def test_a_command_that_samples_in_this_process_does_not_offer_servers(pasta: Pasta) -> None:
    assert "remote" not in pasta("train", "preference", "--help").out
    found = pasta("train", "preference", "--engine", "remote")
    assert found.status == 2
    said = " ".join(found.err.split())
    assert "'remote' is not one of 'auto', 'fast', 'torch', 'llama'" in said
