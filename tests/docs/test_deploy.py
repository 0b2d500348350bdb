"""The steps of deploy/Dockerfile, as a test runs them in a fresh folder."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from pasta_decoding.models.bases import BASES
from tests.docs.pages import ROOT, parse
from tests.remote.fake import until

DOCKERFILES = {one.name: one.read_text() for one in (ROOT / "deploy").glob("Dockerfile*")}


def words(name: str, text: str) -> list[str]:
    found: list[str] = json.loads(re.findall(rf"{name} (\[.*\])", text)[0])
    return found


@pytest.mark.parametrize("text", DOCKERFILES.values(), ids=DOCKERFILES)
def test_an_image_starts_a_command_that_pasta_takes(text: str) -> None:
    assert words("ENTRYPOINT", text) == ["pasta"]
    parse(words("\nCMD", text))
    unit = (ROOT / "deploy/pasta.service").read_text()
    parse(re.findall(r"^ExecStart=\S*/pasta (.*)$", unit, re.M)[0].split())


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_the_steps_of_the_image_give_a_server_that_answers(tmp_path: Path) -> None:
    text, installed = DOCKERFILES["Dockerfile"], tmp_path / "site"
    (context := tmp_path / "context").mkdir()
    for name in re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    [install] = re.findall(r"^RUN pip (install .*)$", text, re.M)
    install = re.sub(r"--extra-index-url \S+ ", "", install)  # it serves torch, which is here
    pip = [sys.executable, "-m", "pip", *shlex.split(install), "--no-deps", "-t", str(installed)]
    done = subprocess.run(pip, cwd=context, capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the package")
    assert done.returncode == 0, done.stderr
    holds_what_it_needs(installed)
    environment = os.environ | {"PYTHONPATH": str(installed), "PASTA_API_KEY": "secret"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "pasta_decoding", *words("\nCMD", text), "--port", port]
    python, *arguments = words("CMD", text)
    assert python == "python"
    health = [sys.executable, *(one.replace("8000", port) for one in arguments)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as server:
        try:
            until(
                lambda: (
                    not subprocess.run(health, stderr=subprocess.DEVNULL, check=False).returncode
                ),
                seconds=300,
            )
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret")
            [model] = client.models.list()
            reply = client.completions.create(model=model.id, prompt="One, two,", max_tokens=4)
        finally:
            server.terminate()
    assert reply.choices[0].text


def holds_what_it_needs(installed: Path) -> None:
    package = installed / "pasta_decoding"
    shipped = [one for base in BASES.values() for one in (base.adapter, base.baseline)]
    assert {one.name for one in (package / "adapters").iterdir()} == {"LICENSE.md", *shipped}
    for name in ("server/page.html", "evaluation/report.html", "engines/linear.cpp"):
        assert (package / name).is_file()
    [metadata] = installed.glob("pasta_decoding-*.dist-info/METADATA")
    assert "License-Expression: Apache-2.0\n" in metadata.read_text()
