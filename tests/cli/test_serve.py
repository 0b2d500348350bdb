"""`pasta serve`: as a process it answers and ends when told to; its options reach the server."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import openai
import pytest

from pasta_decoding.errors import install_command
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.settings import LoadLimits, Settings
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta, interrupted

REMOTE = ("--engine", "remote", "--base-url", "http://127.0.0.1:9/v1", "--join", "text")


@pytest.fixture
def where(tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Say where the tiny checkpoint is. No server of completions is asked what it has."""
    monkeypatch.delenv("PASTA_API_KEY", raising=False)
    monkeypatch.setattr("pasta_decoding.remote.decoder.find_model", lambda *_, **__: ("tiny", None))
    folders = ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter]
    return [*folders, "--engine", "torch", "--port", 0]


def test_serve_says_where_it_is_answers_and_ends_on_ctrl_c(where: list[object]) -> None:
    command = [sys.executable, "-m", "pasta_decoding", "serve", *map(str, where)]
    environment = os.environ | {"PASTA_API_KEY": "sesame"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        match = re.fullmatch(r"pasta-adapter at (http://127\.0\.0\.1:\d+)\n", line)
        assert match, line
        client = openai.OpenAI(base_url=f"{match[1]}/v1", api_key="sesame", max_retries=5)
        got = client.chat.completions.create(
            model="pasta-adapter", messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert got.usage is not None
        assert got.usage.completion_tokens <= 5
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        assert server.stderr.read() == ""


Serve = Callable[..., tuple[Mapping[str, Backend], Settings, str]]


@pytest.fixture
def serve(pasta: Pasta, where: list[object], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return a function that serves up to the first request.

    It returns the backends, what the application is told, and what the user is told.
    """
    started: list[tuple[Mapping[str, Backend], Settings]] = []

    def run(*arguments: object) -> tuple[Mapping[str, Backend], Settings, str]:
        outcome = pasta("serve", *where, *arguments)
        assert outcome.status == 0, outcome.err
        return *started.pop(), outcome.err

    monkeypatch.setattr(
        "pasta_decoding.server.app.create_app",
        lambda backends, _metrics, settings: started.append((backends, settings)),
    )
    monkeypatch.setattr("pasta_decoding.server.listen.http_server", interrupted)
    return run


def test_options_reach_the_backends_and_the_application(
    serve: Serve, tiny_checkpoint: TinyCheckpoint
) -> None:
    origins = "https://a.example", "https://b.example"
    allowed = [part for origin in origins for part in ("--allow-origin", origin)]
    limits = ("--target-ms-per-token", 40, "--max-requests", 3)
    backends, settings, log = serve(
        *(*limits, *allowed, "--name", "mine", "--api-key", "sesame", "--log-level", "error"),
        *("--baseline", tiny_checkpoint.adapter),
    )
    assert list(backends) == ["mine", "adapter"]
    assert backends["mine"].load == LoadLimits(3, target_ms_per_token=40)
    assert (settings.api_key, settings.origins) == ("sesame", origins)
    assert settings.log_level == "error"
    assert "the baseline, adapter, is loaded at the first race" in log
    assert backends["adapter"].decoder is None


@pytest.mark.parametrize(
    ("flags", "hosts", "warned"),
    [
        ([], ("127.0.0.1",), False),
        (["--host", "localhost"], ("localhost",), False),
        (["--host", "0.0.0.0"], None, True),
        (["--host", "0.0.0.0", "--api-key", "sesame"], None, False),
    ],
)
def test_a_server_without_a_key_minds_what_it_is_called_or_warns(
    flags: list[str], hosts: tuple[str, ...] | None, warned: bool, serve: Serve
) -> None:
    backends, settings, log = serve(*REMOTE, *flags)  # no weights to load
    assert (list(backends), settings.hosts) == (["pasta-adapter"], hosts)
    assert ("anybody who reaches this address may ask: --api-key" in log) == warned
    assert f"pasta-adapter at http://{'0.0.0.0' if '0.0.0.0' in flags else '127.0.0.1'}:" in log


def test_a_mistake_is_one_line(pasta: Pasta, where: list[object]) -> None:
    for arguments, message in (
        ([*REMOTE, "--baseline", "sequential"], "this decodes in this process"),
        ([*REMOTE, "--target-ms-per-token", 40], "--target-ms-per-token needs an engine of"),
        (["--api-key", ""], "the API key is empty or has characters that no header can hold"),
    ):
        refused = pasta("serve", *where, *arguments)
        assert (refused.status, f"pasta: {message}" in refused.err) == (2, True)


def test_a_model_that_cannot_write_a_token_is_not_served(
    pasta: Pasta, where: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: object) -> None:
        raise KeyError("sliding_attention")

    monkeypatch.setattr("pasta_decoding.engines.torch.TorchEngine.step", step)
    refused = pasta("serve", *where)
    assert refused.status == 2
    assert "pasta: the model cannot write an answer: 'sliding_att" in refused.err


def test_a_port_that_is_taken_or_an_extra_that_is_missing_is_told_with_its_remedy(
    pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = pasta("serve", "--port", port)
        assert outcome.status == 2
        assert outcome.err.startswith("pasta: cannot listen on 127.0.0.1: ")
        assert "Address already in use" in outcome.err
    monkeypatch.setattr("pasta_decoding.errors.find_spec", lambda _name: None)
    message = "pasta: serving needs the package fastapi"
    assert pasta("serve").complaint == (2, message, install_command("serve"))
