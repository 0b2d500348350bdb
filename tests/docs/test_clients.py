"""Programs that speak OpenAI's API, against the server as docs/serving.md has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.docs.pages import blocks
from tests.server.running import Running, running

PAGE = "docs/serving.md"
ADDRESS = "http://127.0.0.1:8000"
MODEL = "pasta-balanced"


@pytest.fixture(scope="module")
def shared_server(tiny_checkpoint: TinyCheckpoint) -> Iterator[Running]:
    """Serve the tiny checkpoint under the name that the page has."""
    decoder = torch_decoder(tiny_checkpoint.base, tiny_checkpoint.adapter)
    with running(decoder, model=MODEL, answer_tokens=24) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def others_python() -> str:
    """Return the Python that has other programs' clients."""
    if not (found := os.environ.get("CLIENTS")):
        pytest.skip(
            "needs tests/docs/clients.txt: run `make test-all`, or let CLIENTS name a Python"
        )
    return found


def block_of(package: str) -> str:
    """Return the page's block that imports from `package`."""
    found = [one.text for one in blocks(PAGE, "python") if f"from {package} import" in one.text]
    assert len(found) == 1, package
    return found[0]


def for_server(source: str, server: Running) -> str:
    """Return a block of the page with the server's address in place of the page's."""
    assert ADDRESS in source
    return source.replace(ADDRESS, server.url)


def answer_to(source: str, decoder: LocalDecoder) -> str:
    """Return the answer to the block's one question, as the engine gives it."""
    [question] = re.findall(r'"(Give me .*?)"', source)
    request = decoder.request(question, Rules(max_tokens=24), SamplingParams())
    return decoder.answer(request).text


def test_openai_s_client_works_as_the_page_has_it(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    source = block_of("openai")
    exec(compile(for_server(source, server), PAGE, "exec"), {})
    assert capsys.readouterr().out == answer_to(source, server.decoder)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["langchain_openai", "llama_index.llms.openai_like"])
def test_other_clients_work_as_the_page_has_them(
    package: str, server: Running, others_python: str
) -> None:
    source = block_of(package)
    told = [others_python, "-X", "utf8", "-c", for_server(source, server)]
    done = subprocess.run(told, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer_to(source, server.decoder)


def test_the_page_s_line_for_open_webui_turns_its_tools_off() -> None:
    [block] = [one.text for one in blocks(PAGE, "sh") if "open-webui" in one.text]
    told = subprocess.run(
        ["bash", "-c", f"open-webui() {{ env; }}\n{block}"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    found = dict(line.partition("=")[::2] for line in told.stdout.splitlines())
    assert found["OPENAI_API_BASE_URL"] == f"{ADDRESS}/v1"
    assert json.loads(found["DEFAULT_MODEL_METADATA"])["capabilities"]["builtin_tools"] is False
