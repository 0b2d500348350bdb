"""`pasta serve` as a process: it says where it is, answers, and ends when told to."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import openai
import pytest

from pasta_decoding.api.model import AnyDecoder
from pasta_decoding.errors import install_command
from pasta_decoding.runtime import local
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.settings import Load, Settings
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta, interrupted

Serve = Callable[..., tuple[Mapping[str, Backend], str]]


def test_serve_says_where_it_is_answers_and_ends_on_ctrl_c(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    where = ["--model", str(tiny_checkpoint.base), "--adapter", str(tiny_checkpoint.adapter)]
    command = [sys.executable, "-m", "pasta_decoding", "serve", "--port", "0", *where]
    environment = os.environ | {"PASTA_API_KEY": "sesame"}
    with subprocess.Popen(
        [*command, "--engine", "torch"], stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.fullmatch(r"pasta-adapter at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="sesame", max_retries=5)
        got = client.chat.completions.create(
            model="pasta-adapter", messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert got.usage is not None
        assert got.usage.completion_tokens <= 5
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        assert server.stderr.read() == ""


@pytest.fixture
def seen() -> list[Settings]:
    """Return what the application was told, once it was made."""
    return []


@pytest.fixture
def serve(
    pasta: Pasta,
    tiny_checkpoint: TinyCheckpoint,
    seen: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> Serve:
    """Return a function that serves up to the first request; tells the backends, and what it said.

    No server of completions is asked what it has.
    """
    where = ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter, "--port", 0]
    found: list[Mapping[str, Backend]] = []

    def run(*arguments: object, engine: str = "torch") -> tuple[Mapping[str, Backend], str]:
        outcome = pasta("serve", *where, "--engine", engine, *arguments)
        assert outcome.status == 0, outcome.err
        return found.pop(), outcome.err

    def create_app(backends: Mapping[str, Backend], _metrics: object, settings: Settings) -> None:
        found.append(backends)
        seen.append(settings)

    monkeypatch.delenv("PASTA_API_KEY", raising=False)
    monkeypatch.setattr("pasta_decoding.remote.decoder.find_model", lambda *_, **__: ("tiny", None))
    monkeypatch.setattr("pasta_decoding.server.app.create_app", create_app)
    monkeypatch.setattr("pasta_decoding.server.listen.http_server", interrupted)
    return run


REMOTE = ("--base-url", "http://127.0.0.1:9/v1", "--join", "text")


def test_a_latency_goal_and_limits_reach_the_backend(serve: Serve, pasta: Pasta) -> None:
    options = ("--target-ms-per-token", 40, "--max-requests", 3, "--max-queue", 5)
    [backend] = serve(*options, "--max-prefill-share", 0.5)[0].values()
    assert backend.load == Load(3, 5, target_ms_per_token=40, max_prefill_share=0.5)
    refused = pasta("serve", "--max-prefill-share", 1)
    assert refused.status == 2
    assert "--max-prefill-share" in refused.err


def test_a_baseline_is_named_at_the_start_and_loaded_later(
    serve: Serve, tiny_checkpoint: TinyCheckpoint
) -> None:
    backends, said = serve("--baseline", tiny_checkpoint.adapter)
    assert list(backends) == ["pasta-adapter", "adapter"]
    assert "the baseline, adapter, is loaded at the first race" in said
    baseline = backends["adapter"]
    assert baseline.decoder is None
    decoder = asyncio.run(loaded(baseline))
    assert not decoder.parallel


async def loaded(backend: Backend) -> AnyDecoder:
    decoder = await backend.ready()
    await backend.stop()
    return decoder


@pytest.mark.parametrize(
    ("engine", "where", "named", "message"),
    [
        ("torch", (), "nowhere", "no adapter 'nowhere'"),
        ("remote", REMOTE, "sequential", "this decodes in this process"),
    ],
)
def test_a_baseline_that_cannot_be_is_refused_at_the_start(
    engine: str,
    where: tuple[str, ...],
    named: str,
    message: str,
    pasta: Pasta,
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pasta_decoding.remote.decoder.find_model", lambda *_, **__: ("tiny", None))
    model = ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter, "--port", 0]
    refused = pasta("serve", *model, "--engine", engine, *where, "--baseline", named)
    assert refused.status == 2
    assert message in refused.err


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", [], False),
        ("0.0.0.0", [], True),
        ("0.0.0.0", ["--api-key", "sesame"], False),
    ],
)
def test_whoever_opens_the_server_to_everybody_is_warned(
    host: str, key: list[str], warned: bool, serve: Serve
) -> None:
    _, said = serve("--host", host, *key)
    warning = "anybody who reaches this address may ask: --api-key keeps them out\n"
    assert (warning in said) == warned
    assert f"pasta-adapter at http://{host}:" in said


def test_only_a_server_without_a_key_minds_what_it_is_called(
    serve: Serve, seen: list[Settings]
) -> None:
    for told, hosts in (
        ((), ("127.0.0.1",)),
        (("--host", "localhost"), ("localhost",)),
        (("--api-key", "sesame"), None),
        (("--host", "0.0.0.0"), None),
    ):
        serve(*told)
        assert seen.pop().hosts == hosts


def test_edges_are_as_the_options_say(serve: Serve, seen: list[Settings]) -> None:
    origins = "https://a.example", "https://b.example"
    allowed = [part for origin in origins for part in ("--allow-origin", origin)]
    serve("--api-key", "sesame", *allowed, "--drain-seconds", 0.5, "--log-level", "error")
    [settings] = seen
    assert (settings.api_key, settings.origins) == ("sesame", origins)
    assert (settings.drain_seconds, settings.log_level) == (0.5, "error")


def test_a_context_that_cannot_fit_is_refused_before_the_weights_are_loaded(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    where = ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter, "--port", 0]
    refused = pasta("serve", *where, "--engine", "torch", "--cache-tokens", 10**12)
    assert refused.status == 2
    assert refused.err.startswith("pasta: a cache of 1000000000000 tokens takes ")


def test_a_port_that_is_taken_is_told(pasta: Pasta) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, message, hint = pasta("serve", "--port", port).complaint
    assert (status, hint) == (2, "Give another --port or --host.")
    assert message == f"pasta: cannot listen on 127.0.0.1, port {port}: Address already in use"


def test_a_key_that_no_client_could_send_is_refused(pasta: Pasta) -> None:
    expected = "pasta: the API key is empty or has characters that no header can hold"
    for key in ("", "a b", "clé"):
        assert pasta("serve", "--api-key", key).err.startswith(expected)


def test_without_the_extra_the_user_is_told_what_to_install(
    pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pasta_decoding.cli.serve.find_spec", lambda _name: None)
    assert pasta("serve").complaint == (
        2,
        "pasta: the server needs fastapi, uvicorn, prometheus_client",
        f"Install the extra: {install_command('serve')}",
    )
