"""A checkpoint is compiled beside a server that already answers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from pasta_decoding.api import opening
from pasta_decoding.api.compiled import Compiled, compiled_meanwhile, ready
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import worth_compiling
from pasta_decoding.api.place import Place
from pasta_decoding.engines.compiled import CompiledPass
from pasta_decoding.errors import PastaError
from tests.checkpoint import TinyCheckpoint


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def here(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))  # of the other process
    return Place(tmp_path, told.append)


def settings_of(tiny: TinyCheckpoint, engine: str, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=tiny.base, adapter=str(tiny.adapter), engine=engine, dtype=dtype, threads=1
    )


def test_only_what_torch_would_compute_on_a_cpu_is_worth_it(
    tiny_checkpoint: TinyCheckpoint, here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "llama_can_run", lambda *_: False)
    asked = settings_of(tiny_checkpoint, "compiled", "float32")
    wanted = Compiled(tiny_checkpoint.base, tiny_checkpoint.adapter, "float32", 1)
    assert worth_compiling(asked, here) == wanted
    auto = settings_of(tiny_checkpoint, "auto", "bfloat16")
    assert worth_compiling(auto, here) == replace(wanted, dtype="bfloat16")
    assert worth_compiling(replace(auto, dtype="float32"), here) is None
    assert worth_compiling(replace(auto, engine="torch"), here) is None
    monkeypatch.setattr(opening, "llama_can_run", lambda *_: True)
    assert worth_compiling(auto, here) is None


def test_a_compiler_that_is_killed_is_told(
    tiny_checkpoint: TinyCheckpoint,
    here: Place,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Compiled, "command", ["sh", "-c", "kill -9 $$"])
    wanted = Compiled(tiny_checkpoint.base, tiny_checkpoint.adapter, "float32", 1)
    with compiled_meanwhile(wanted, here, lambda _: None):
        ended = time.monotonic() + 60
        while not told and time.monotonic() < ended:
            time.sleep(0.05)
    assert told == ["not compiled, so steps stay as they are: it was ended early"]


def test_what_cannot_be_compiled_is_told_and_nothing_changes(
    tiny_checkpoint: TinyCheckpoint, here: Place, told: list[str]
) -> None:
    wanted = Compiled(tiny_checkpoint.base, here.cache / "no-such-adapter", "float32", 1)

    def refuse(_: CompiledPass) -> None:
        raise AssertionError("nothing was compiled")

    with compiled_meanwhile(wanted, here, refuse):
        ended = time.monotonic() + 60
        while not told and time.monotonic() < ended:
            time.sleep(0.05)
    (line,) = told
    assert line.startswith("not compiled, so steps stay as they are: ")
    assert "no-such-adapter" in line


def test_it_ends_with_the_server(
    tiny_checkpoint: TinyCheckpoint, here: Place, told: list[str]
) -> None:
    wanted = Compiled(tiny_checkpoint.base, tiny_checkpoint.adapter, "float32", 1)
    with compiled_meanwhile(wanted, here, lambda _: None):
        pass
    assert told == []
    assert not ready(wanted, here)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_is_handed_over(tiny_checkpoint: TinyCheckpoint, here: Place) -> None:
    wanted = Compiled(tiny_checkpoint.base, tiny_checkpoint.adapter, "float32", 1)
    done, programs = Event(), list[CompiledPass]()

    def take(program: CompiledPass) -> None:
        programs.append(program)
        done.set()

    with compiled_meanwhile(wanted, here, take):
        assert done.wait(800)
    assert len(programs) == 1
    assert ready(wanted, here)


def test_without_a_compiler_only_who_asks_is_refused(
    tiny_checkpoint: TinyCheckpoint, here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise PastaError("no C++ compiler was found")

    monkeypatch.setattr("pasta_decoding.engines.compiled.check_compiler", refuse)
    monkeypatch.setattr(opening, "llama_can_run", lambda *_: False)
    auto = settings_of(tiny_checkpoint, "auto", "bfloat16")
    assert worth_compiling(auto, here) is None
    with pytest.raises(PastaError, match="compiler"):
        worth_compiling(replace(auto, engine="compiled"), here)
