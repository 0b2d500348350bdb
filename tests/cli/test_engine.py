"""`pasta export`, whole models, and which engine answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pasta_decoding.errors import install_command
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.load import load_base, may_have_gpu
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta

PROMPT = ("run", "Hello", "--max-tokens", "48", "--json")
TORCH = ("--engine", "torch", "--dtype", "float32")


@pytest.fixture
def where(tiny_checkpoint: TinyCheckpoint) -> list[object]:
    return ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_merged_export_is_a_model_and_an_adapter_alike_and_takes_no_other(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, where: list[object], tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    export = ["export", tiny_checkpoint.adapter, "--model", tiny_checkpoint.base, "--to", "hf"]
    assert pasta(*export, "-o", merged).out == f"{merged}\n"
    expected = pasta(*PROMPT, *TORCH, *where).object["annotated"]
    for name in ("--model", "--adapter"):
        assert pasta(*PROMPT, *TORCH, name, merged).object["annotated"] == expected
    again = pasta(*export, "-o", merged)
    assert again.status == 2
    assert f"{merged} exists" in again.err
    for beside in (("--model", merged, "--adapter", "none"), (*where, "--adapter", merged)):
        found = pasta(*PROMPT, *beside)
        assert found.status == 2
        assert f"pasta: {merged} is a whole model, adapter included" in found.err


def test_an_adapter_on_a_copy_rounded_otherwise_answers_with_a_warning(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model, tokenizer = load_base(tiny_checkpoint.base, dtype="float32")
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_((model.model.embed_tokens.weight * 8).round() / 8)
    model.save_pretrained(tmp_path / "rounded")
    tokenizer.save_pretrained(tmp_path / "rounded")
    adapter = ["--adapter", tiny_checkpoint.adapter]
    found = pasta(*PROMPT, *TORCH, *adapter, "--model", tmp_path / "rounded")
    assert found.status == 0
    assert "trained on a copy of tests/tiny-llama that is rounded otherwise" in found.err
    as_trained = pasta(*PROMPT, *TORCH, *adapter, "--model", tiny_checkpoint.base)
    assert "rounded otherwise" not in as_trained.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "any.gguf", "--engine", "torch"], "the torch engine does not read GGUF files"),
        (["--model", "any.gguf", "--adapter", "x"], "any.gguf is a whole model, adapter included"),
        (["--engine", "llama"], "llama-cpp-python"),
        (["--engine", "torch", "--device", "cuda:7"], "cannot put the model on the device"),
        (["--engine", "remote"], "no server is named"),
    ],
)
def test_an_engine_that_cannot_answer_is_refused(
    arguments: list[str], said: str, pasta: Pasta, where: list[object]
) -> None:
    found = pasta(*PROMPT, *([] if "any.gguf" in arguments else where), *arguments)
    assert found.status == 2
    assert said in found.err


def test_without_llama_auto_takes_torch_and_an_export_says_what_to_install(
    pasta: Pasta, where: list[object], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    auto, named = (pasta(*PROMPT, *where, *flags) for flags in ((), ("--engine", "torch")))
    assert auto.object["annotated"] == named.object["annotated"]
    assert "engine: torch " in auto.err
    base, adapter, out = tiny_checkpoint.base, tiny_checkpoint.adapter, tmp_path / "x.gguf"
    found = pasta("export", adapter, "--model", base, "-o", out, "--dtype", "Q8_0")
    assert found.status == 2
    assert install_command("llama") in found.err
    assert list(tmp_path.iterdir()) == []
    assert pasta("export", adapter, "--model", base, "-o", tmp_path).status == 2


@pytest.mark.llama
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "Q8_0", "Q4_0"])
def test_an_exported_file_answers(
    dtype: str, pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter, out = tiny_checkpoint.base, tiny_checkpoint.adapter, tmp_path / "tiny.gguf"
    made = pasta("export", adapter, "--model", base, "-o", out, "--dtype", dtype)
    assert (made.status, made.out) == (0, f"{out}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    found = pasta(*PROMPT, "--model", out).object
    assert check(found["annotated"]) == []
    assert strip(read(found["annotated"])) == found["text"] != ""
    short = pasta("run", "Hello", "--model", out, "--cache-tokens", "256", "--max-tokens", "250")
    assert (short.status, "too long" in short.err) == (2, True)


def adapter_with(adapter: Path, folder: Path, **changes: str) -> Path:
    """Copy an adapter and change its `pasta.json`."""
    path = shutil.copytree(adapter, folder) / "pasta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.llama
@pytest.mark.usefixtures("own_cache")
def test_positions_that_llama_cannot_take_are_left_to_torch_unless_llama_is_asked_for(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter = adapter_with(tiny_checkpoint.adapter, tmp_path / "adapter", scheme="reserve")
    where = ("--model", tiny_checkpoint.base, "--adapter", adapter)
    auto, named = (pasta(*PROMPT, *where, *flags).object for flags in ((), ("--engine", "torch")))
    assert auto["annotated"] == named["annotated"]
    found = pasta(*PROMPT, *where, "--engine", "llama")
    assert found.status == 2
    assert "the engine 'llama F16' cannot take the positions of the scheme 'reserve'" in found.err


@pytest.mark.llama
def test_the_llama_engine_exports_once_into_the_cache(
    pasta: Pasta, where: list[object], own_cache: Path
) -> None:
    first = pasta(*PROMPT, *where, "--engine", "llama", "--threads", "1", "--cache-tokens", "512")
    again = pasta(*PROMPT, *where)
    assert "(once)" in first.err
    assert "(once)" not in again.err
    assert first.object["annotated"] == again.object["annotated"]
    assert [path.suffix for path in (own_cache / "gguf").iterdir()] == [".gguf"]


@pytest.mark.llama
@pytest.mark.parametrize("name", ["foreign.gguf", "missing.gguf"])
def test_a_file_that_is_no_export_is_refused(name: str, pasta: Pasta, tmp_path: Path) -> None:
    (tmp_path / "foreign.gguf").write_bytes(b"GGUF and nothing more")
    found = pasta(*PROMPT, "--model", tmp_path / name)
    assert found.status == 2
    assert str(tmp_path / name) in found.err


@pytest.mark.llama
@pytest.mark.usefixtures("own_cache")
def test_an_answer_of_llama_needs_neither_torch_nor_transformers(
    pasta: Pasta, where: list[object]
) -> None:
    first = pasta(*PROMPT, *where, "--engine", "llama")  # makes the file
    device = ("--device", "cpu") if may_have_gpu() else ()  # else torch is asked for it
    arguments = [str(argument) for argument in (*PROMPT, *where, *device)]
    script = (
        "import sys; from pasta_decoding.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'torch', 'transformers', 'peft'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    answer, modules = done.stdout.splitlines()
    assert modules == "0 []"
    assert json.loads(answer)["annotated"] == first.object["annotated"]
