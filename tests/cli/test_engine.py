"""`pasta export` and the options that choose an engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pasta_decoding.api.compiled import Compiled
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


def test_a_merged_export_answers_as_base_and_adapter_do(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, where: list[object], tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    export = ["export", tiny_checkpoint.adapter, "--model", tiny_checkpoint.base, "--to", "hf"]
    assert pasta(*export, "-o", merged).out == f"{merged}\n"
    alone = pasta(*PROMPT, *TORCH, "--adapter", merged).object
    together = pasta(*PROMPT, *TORCH, *where).object
    assert alone["annotated"] == together["annotated"]
    again = pasta(*export, "-o", merged)
    assert again.status == 2
    assert f"{merged} exists" in again.err


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


def test_exporting_over_a_folder_is_refused(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter = tiny_checkpoint.base, tiny_checkpoint.adapter
    found = pasta("export", adapter, "--model", base, "-o", tmp_path)
    assert found.complaint == (2, f"pasta: {tmp_path} is a folder", "Give -o the name of a file.")


def test_without_llama_auto_takes_torch_and_llama_tells_how_to_install_it(
    pasta: Pasta, where: list[object]
) -> None:
    auto, torch = (pasta(*PROMPT, *where, *flags).object for flags in ((), ("--engine", "torch")))
    assert auto["annotated"] == torch["annotated"]
    status, message, hint = pasta(*PROMPT, *where, "--engine", "llama").complaint
    assert status == 2
    assert "llama-cpp-python" in message
    assert install_command("llama") in hint


def test_quantising_without_llama_is_refused_and_leaves_nothing(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter, out = tiny_checkpoint.base, tiny_checkpoint.adapter, tmp_path / "x.gguf"
    found = pasta("export", adapter, "--model", base, "-o", out, "--type", "Q8_0")
    assert found.status == 2
    assert "pip install" in found.err
    assert "Writing" not in found.err  # told before the work
    assert list(tmp_path.iterdir()) == []


@pytest.mark.llama
@pytest.mark.parametrize("file_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_an_exported_file_answers(
    file_type: str, pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter, out = tiny_checkpoint.base, tiny_checkpoint.adapter, tmp_path / "tiny.gguf"
    made = pasta("export", adapter, "--model", base, "-o", out, "--type", file_type)
    assert (made.status, made.out) == (0, f"{out}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    found = pasta(*PROMPT, "--model", out).object
    assert check(found["annotated"]) == []
    assert strip(read(found["annotated"])) == found["text"] != ""


def adapter_with(adapter: Path, folder: Path, **changes: str) -> Path:
    """Copy an adapter and change its `pasta.json`."""
    path = shutil.copytree(adapter, folder) / "pasta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.llama
def test_an_exported_checkpoint_without_topics_writes_none(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter = adapter_with(tiny_checkpoint.adapter, tmp_path / "adapter", topic="none")
    out = tmp_path / "tiny.gguf"
    pasta("export", adapter, "--model", tiny_checkpoint.base, "-o", out, "--type", "F32")
    found = pasta(*PROMPT, "--model", out).object
    assert '<promise tokens="' in found["annotated"]
    assert check(found["annotated"], topic_required=False) == []


@pytest.mark.llama
def test_positions_that_llama_cannot_take_are_left_to_torch_unless_llama_is_asked_for(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    adapter = adapter_with(tiny_checkpoint.adapter, tmp_path / "adapter", scheme="reserve")
    where = ("--model", tiny_checkpoint.base, "--adapter", adapter)
    auto, torch = (pasta(*PROMPT, *where, *flags).object for flags in ((), ("--engine", "torch")))
    assert auto["annotated"] == torch["annotated"]
    status, message, hint = pasta(*PROMPT, *where, "--engine", "llama").complaint
    assert status == 2
    assert message.endswith(
        "pasta: the engine 'llama F16' cannot take the positions of the scheme 'reserve'"
    )
    assert hint == "Use --engine torch, or another adapter."


@pytest.mark.llama
def test_the_llama_engine_exports_once_into_the_cache(
    pasta: Pasta, where: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    first = pasta(*PROMPT, *where, "--engine", "llama", "--threads", "1", "--cache-tokens", "512")
    again = pasta(*PROMPT, *where)
    assert "(once)" in first.err
    assert "(once)" not in again.err
    assert first.object["annotated"] == again.object["annotated"]
    assert [path.suffix for path in (tmp_path / "gguf").iterdir()] == [".gguf"]


@pytest.mark.llama
def test_a_context_smaller_than_the_answer_is_refused(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter, out = tiny_checkpoint.base, tiny_checkpoint.adapter, tmp_path / "tiny.gguf"
    pasta("export", adapter, "--model", base, "-o", out)
    found = pasta("run", "Hello", "--model", out, "--cache-tokens", "256", "--max-tokens", "250")
    assert found.status == 2
    assert "too long" in found.err


@pytest.mark.llama
@pytest.mark.parametrize("name", ["foreign.gguf", "missing.gguf"])
def test_a_file_that_is_no_export_is_refused(name: str, pasta: Pasta, tmp_path: Path) -> None:
    (tmp_path / "foreign.gguf").write_bytes(b"GGUF and nothing more")
    found = pasta(*PROMPT, "--model", tmp_path / name)
    assert found.status == 2
    assert "pasta export" in found.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "torch"), "pasta: the torch engine does not read GGUF files"),
        (("--adapter", "other"), "pasta: {file} is a whole model, adapter and all"),
    ],
)
def test_what_contradicts_a_gguf_file_is_refused(
    flags: tuple[str, str], message: str, pasta: Pasta, tmp_path: Path
) -> None:
    file = tmp_path / "any.gguf"
    found = pasta(*PROMPT, "--model", file, *flags)
    assert found.complaint[:2] == (2, message.format(file=file))


def test_a_device_that_is_not_there_is_refused(pasta: Pasta, where: list[object]) -> None:
    status, message, hint = pasta(*PROMPT, *TORCH, *where, "--device", "cuda:7").complaint
    assert (status, hint) == (2, "Use --device cpu.")
    assert "pasta: cannot put the model on the device 'cuda:7'" in message


@pytest.mark.llama
def test_an_answer_of_llama_needs_neither_torch_nor_transformers(
    pasta: Pasta, where: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
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


def test_a_compiled_model_that_is_of_no_use_is_told_and_auto_goes_on_without(
    pasta: Pasta,
    tiny_checkpoint: TinyCheckpoint,
    where: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir(mode=0o700)
    name = Compiled(tiny_checkpoint.base, tiny_checkpoint.adapter, "bfloat16", 1).name
    (tmp_path / "compiled" / f"{name}.json").write_text("{")
    flags = ("--threads", "1", "--dtype", "bfloat16")
    auto = pasta(*PROMPT, *where, *flags)
    assert f"the compiled model {name} is damaged. Make it again: pasta compile." in auto.err
    assert (
        auto.object["annotated"]
        == pasta(*PROMPT, *where, *flags, "--engine", "torch").object["annotated"]
    )


def test_without_a_compiler_compile_says_so_and_leaves_nothing(
    pasta: Pasta, where: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = pasta("compile", *where)
    assert found.complaint[:2] == (2, "pasta: no C++ compiler was found")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_compile_made_answers_as_torch_does_and_auto_takes_it(
    pasta: Pasta, where: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    made = pasta("compile", *where, "--dtype", "float32")
    assert Path(made.out.strip()).parent == tmp_path / "compiled"
    compiled = pasta(*PROMPT, *where, "--engine", "compiled", "--dtype", "float32")
    assert compiled.object["annotated"] == pasta(*PROMPT, *where, *TORCH).object["annotated"]
    pasta("compile", *where, "--dtype", "bfloat16")
    assert "engine: compiled bfloat16" in pasta(*PROMPT, *where, "--dtype", "bfloat16").err
