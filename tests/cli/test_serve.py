"""`pasta serve` as a process: it says where it is, answers, and ends when told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest

from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta


@pytest.mark.timeout(240)
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
        assert server.wait(60) == 0
        assert server.stderr.read() == ""


def test_a_port_that_is_taken_is_told(pasta: Pasta) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, message, hint = pasta("serve", "--port", port).complaint
    assert (status, hint) == (2, "Give another --port or --host.")
    assert message == f"pasta: cannot listen on 127.0.0.1, port {port}: Address already in use"


def test_a_key_that_no_client_could_send_is_refused(pasta: Pasta) -> None:
    expected = "pasta: the API key is empty or has characters that no header can hold"
    for key in ("", "a b", "clé"):
        assert pasta("serve", "--api-key", key).complaint[1] == expected


def test_without_the_extra_the_user_is_told_what_to_install(
    pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pasta_decoding.cli.serve.find_spec", lambda _name: None)
    assert pasta("serve").complaint == (
        2,
        "pasta: the server needs fastapi, uvicorn, prometheus_client",
        'Install the extra: pip install "pasta-decoding[serve]"',
    )
