"""What the compiled forward pass promises beyond the contract and the law."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pasta_decoding.engines import compiled
from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.engines.compiled import MAX_TOKENS, CompiledPass, compile_model
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from tests.engines.subjects import compiled_tiny
from tests.tiny import tiny_llama

pytestmark = pytest.mark.timeout(900)


def feeds(branches: list[Branch], position: int) -> list[Feed]:
    return [Feed((branch,), (7,), (position,)) for branch in branches]


def test_decoding_at_any_width_and_length_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(tiny_llama(), compiled=compiled_tiny("llama"))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    monkeypatch.setattr("torch._dynamo.convert_frame.compile_frame", refuse)
    main = engine.open(reserved_tokens=1000)
    engine.step([Feed((main,), (1,) * 300, tuple(range(300)))])
    branches = [main]
    for position in range(300, 330):
        assert engine.step(feeds(branches, position)).shape == (len(branches), 100)
        branches.append(engine.fork(main))


def test_the_program_computes_in_place_of_the_model_unless_a_pass_is_too_wide() -> None:
    model, widths = tiny_llama(max_position_embeddings=2000), []
    engine = TorchEngine(model, compiled=compiled_tiny("llama"))

    def count(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        widths.append(arguments[0].shape[1])

    model.get_input_embeddings().register_forward_pre_hook(count)
    main, start = engine.open(reserved_tokens=2000), 0
    for width in (1, 2, 40, MAX_TOKENS, MAX_TOKENS + 1, 1):
        engine.step([Feed((main,), (3,) * width, tuple(range(start, start + width)))])
        start += width
    assert widths == [MAX_TOKENS + 1]
    assert engine.name == "compiled float32"


def test_compiling_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    program = compiled._exported(model, {})
    assert model.config._attn_implementation == "sdpa"
    calls = [str(node.target) for node in program.graph.nodes if "pasta" in str(node.target)]
    assert calls == ["pasta.attend.default"] * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [True, False])
def test_products_are_those_of_the_processor_and_either_kind_is_right(
    tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert ("max_autotune" in compiled.inductor_options()) == tiles
    compile_model(tiny_llama(), {}, tmp_path / "tiny.pt2", tmp_path)
    engines = (
        TorchEngine(tiny_llama(), compiled=CompiledPass(tmp_path / "tiny.pt2")),
        TorchEngine(tiny_llama()),
    )
    for ids in ((5, 9, 2, 7, 30, 4), (8,)):
        place = tuple(range(len(ids)))
        found, expected = (
            engine.step([Feed((engine.open(reserved_tokens=50),), ids, place)])
            for engine in engines
        )
        assert torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), atol=1e-4)


def test_without_a_compiler_a_sentence_says_so(tmp_path: Path) -> None:
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(PastaError, match=r"^no C\+\+ compiler was found$") as error:
        compile_model(tiny_llama(), {}, tmp_path / "x.pt2", tmp_path)
    assert "g++" in error.value.hint


def test_what_cannot_be_compiled_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", broken)
    with pytest.raises(PastaError) as error:
        compile_model(tiny_llama(), {}, tmp_path / "x.pt2", tmp_path)
    assert str(error.value) == "this model cannot be compiled: first line"


def test_a_loaded_program_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def load(_path: str) -> None:
        seen.append(Path(os.environ["TMPDIR"]))
        (seen[0] / "unpacked.so").write_bytes(b"code")

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "as before")
    CompiledPass(tmp_path / "x.pt2")
    assert seen[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert os.environ["TMPDIR"] == "as before"


def test_programs_that_are_loaded_at_once_do_not_share_where_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = threading.Semaphore(1)

    def load(_path: str) -> None:
        assert inside.acquire(blocking=False), "one at a time"
        assert Path(os.environ["TMPDIR"]).is_dir()
        time.sleep(0.1)
        inside.release()

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    monkeypatch.setenv("TMPDIR", "as before")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: CompiledPass(tmp_path / "x.pt2"), range(3)))
    assert os.environ["TMPDIR"] == "as before"


def test_a_model_that_the_engine_refuses_is_not_compiled(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(PastaError, match="its attention caps its scores"):
        compile_model(model, {}, tmp_path / "x.pt2", tmp_path)


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(b"nothing")
    with pytest.raises(PastaError, match="cannot be loaded"):
        CompiledPass(path)
