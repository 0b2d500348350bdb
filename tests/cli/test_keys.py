"""Whose key goes where: the server's own secret is not told to strangers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pasta_decoding.cli.keys import endpoint_key
from tests.chatserver import chat_server, in_turn
from tests.cli.conftest import Pasta

HERE, THERE = "http://127.0.0.1:8000/v1", "https://api.example.com/v1"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets these variables and no other."""

    def put(**names: str) -> None:
        for name in ("PASTA_ENDPOINT_KEY", "OPENAI_API_KEY", "PASTA_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, key in names.items():
            monkeypatch.setenv(name, key)

    return put


def test_the_endpoints_own_key_comes_first(
    keys: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keys()
    assert endpoint_key(THERE) == ""
    keys(PASTA_API_KEY="ours", OPENAI_API_KEY="general")
    assert endpoint_key(THERE) == "general"
    keys(PASTA_API_KEY="ours", OPENAI_API_KEY="general", PASTA_ENDPOINT_KEY="theirs")
    assert endpoint_key(THERE) == "theirs"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "url", [THERE, "http://10.0.0.7/v1", "http://127.0.0.1.example.com", "http://localhost.evil"]
)
def test_the_servers_key_goes_to_no_other_machine(
    url: str, keys: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keys(PASTA_API_KEY="ours", PASTA_ENDPOINT_KEY="")
    assert endpoint_key(url) == ""
    assert capsys.readouterr().err == (
        f"PASTA_API_KEY is the key of `pasta serve` and is not sent to {url}; "
        "put the endpoint's key into PASTA_ENDPOINT_KEY\n"
    )


@pytest.mark.parametrize("url", [HERE, "http://localhost:8000/v1", "http://[::1]:8000/v1"])
def test_the_servers_key_still_opens_it_on_this_machine_and_that_is_said(
    url: str, keys: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keys(PASTA_API_KEY="ours")
    assert endpoint_key(url) == "ours"
    assert capsys.readouterr().err == (
        f"{url} is sent PASTA_API_KEY, the key of `pasta serve`; "
        "put the endpoint's key into PASTA_ENDPOINT_KEY\n"
    )


@pytest.mark.usefixtures("tiny_cache")
def test_annotate_sends_the_endpoints_key(
    keys: Callable[..., None], pasta: Pasta, tmp_path: Path
) -> None:
    keys(PASTA_API_KEY="ours", PASTA_ENDPOINT_KEY="theirs")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "How?", "completion": "So."}')
    command = ("annotate", rows, tmp_path / "out.jsonl", "--with", "llm")
    with chat_server(in_turn(["So."])) as server:
        assert pasta(*command, "--base-url", server.base_url, "--model", "m").status == 0
        assert set(server.keys) == {"Bearer theirs"}
