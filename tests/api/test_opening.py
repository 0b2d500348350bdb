"""The default adapter, the choice of an engine, and settings that are refused."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.api.defaults import default_adapter
from pasta_decoding.api.opening import choose_engine, find_files, open_decoder
from pasta_decoding.engines import native
from pasta_decoding.engines.llama import load_library
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.bases import DEFAULT_MODEL
from pasta_decoding.models.catalog import find_adapter
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.pull import pull
from pasta_decoding.server.settings import Settings
from tests.checkpoint import TinyCheckpoint
from tests.engines.subjects import speaking
from tests.tiny import TINY_MODELS

LARGE = "qwen2.5-coder-1.5b"


def config_of(tiny: TinyCheckpoint, **settings: Any) -> EngineConfig:
    defaults: Any = {"model": tiny.base, "adapter": tiny.adapter, "device": "cpu"}
    return EngineConfig(**defaults | settings)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (None, ""),
        ("echo 'error: no -fopenmp' >&2; exit 1", "no operators could be built (error: no -fop"),
        ("[ $last = /dev/null ] || echo > $last", "what is built cannot be run there"),
    ],
)
def test_without_operators_auto_does_not_take_fast(
    compiler: str | None,
    message: str,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    load_library.cache_clear()
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\nfor last; do :; done\n{compiler}\n")
    script.chmod(0o755)
    find_compiler = "pasta_decoding.engines.native.find_compiler"
    monkeypatch.setattr(find_compiler, lambda: compiler and str(script))
    assert choose_engine(find_files(config_of(tiny_checkpoint), tmp_path)) == "torch"
    assert message in caplog.text
    assert [*(tmp_path / "operators").glob("*.so")] or "run" not in message, "those of this cache"
    load_library.cache_clear()


@pytest.mark.llama
def test_with_llama_auto_takes_it_where_it_can_and_exports_once(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_checkpoint, threads=1, cache_tokens=512)
    with caplog.at_level("INFO", "pasta_decoding"):
        first, again = (open_decoder(config, tmp_path) for _ in range(2))
    assert first.name == again.name == "llama F16"
    assert sum("(once)" in record.getMessage() for record in caplog.records) == 1
    assert [path.suffix for path in (tmp_path / "gguf").iterdir()] == [".gguf"]
    folder = shutil.copytree(tiny_checkpoint.adapter, tmp_path / "adapter")
    record = json.loads((folder / "pasta.json").read_text()) | {"scheme": "reserve"}
    (folder / "pasta.json").write_text(json.dumps(record))
    reserve = config_of(tiny_checkpoint, adapter=folder)
    assert choose_engine(find_files(reserve, tmp_path)) in ("fast", "torch")
    with pytest.raises(PastaError, match="cannot take the positions of the scheme 'reserve'"):
        open_decoder(config_of(tiny_checkpoint, adapter=folder, engine="llama"), tmp_path)


def test_what_an_engine_cannot_do_is_refused(tiny_checkpoint: TinyCheckpoint) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_model_len": 10_000}, "max_model_len is 10000, and model and cache hold"),
        ({"cache_tokens": 10**12}, "a cache of 1000000000000 tokens takes"),
        ({"dtype": "Q4_0"}, "the torch engine has no number format Q4_0"),
        ({"device": "cuda:7"}, "cannot put the model on the device"),
        ({"engine": "fast", "device": "cuda"}, "^the engine fast takes no device$"),
        ({"engine": "remote", "threads": 2}, "^the engine remote takes no threads$"),
    ]
    for settings, message in cases:
        with pytest.raises(PastaError, match=message):
            open_decoder(config_of(tiny_checkpoint, **{"engine": "torch"} | settings), Path())


def test_a_pulled_gguf_goes_to_fast_on_a_cpu_with_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    file = tmp_path / "tiny.gguf"
    name = LARGE
    write_gguf(speaking(TINY_MODELS["qwen2"]()), file, float_type="F32")
    monkeypatch.setattr("pasta_decoding.models.pull.fetch_wheels", lambda *_: file)
    path = pull(cache, name)
    by_model: dict[str, Any] = {"model": name, "device": "cpu"}
    monkeypatch.setattr("pasta_decoding.engines.native.find_compiler", lambda: "c++")
    monkeypatch.setattr("pasta_decoding.engines.native.load_operators", lambda _: "built")
    for settings in (by_model, {"adapter": f"{name}-sequential", "device": "cpu"}):
        files = find_files(EngineConfig(**settings), cache)
        assert (files.source.weights, choose_engine(files)) == (path, "fast")
        assert files.source.checkpoint_path == find_adapter(str(settings.get("adapter", name)))
    on_gpu = find_files(EngineConfig(**by_model | {"device": "cuda"}), cache)
    assert (on_gpu.source.weights, choose_engine(on_gpu)) == (path, "torch")
    monkeypatch.setattr("pasta_decoding.engines.native.find_compiler", lambda: None)
    assert choose_engine(find_files(EngineConfig(**by_model), cache)) in ("llama", "torch")


@pytest.mark.parametrize(
    ("machine", "there", "config", "lacks"),
    [
        ((4.2, "c++", 2.5), "", EngineConfig(), ""),
        ((4, "c++", 2.5), LARGE, EngineConfig(), "4.2 GB of free memory"),
        ((4.2, None, 2.5), "", EngineConfig(), "a C++ compiler (g++)"),
        ((4.2, None, 2.5), "", EngineConfig(device="cuda"), ""),
        ((4.2, "c++", 2), "", EngineConfig(), "2.5 GB of free disk at {}"),
        ((4.2, "c++", 2), LARGE, EngineConfig(), ""),
        ((4.2, "c++", 2.5), "", EngineConfig(engine="torch"), "the engine auto or fast"),
        ((4.2, "c++", 2.5), DEFAULT_MODEL, EngineConfig(), f"`pasta pull {LARGE}`"),
        ((4.2, "c++", 2.5), DEFAULT_MODEL, None, ""),
    ],
)
def test_commands_take_the_large_model_where_there_is_room_and_the_small_one_is_not_there_alone(
    machine: tuple[float, str | None, float],
    there: str,
    config: EngineConfig | None,
    lacks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pasta_decoding")
    memory_gb, compiler, disk_gb = machine
    free = SimpleNamespace(available=memory_gb * 1e9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=disk_gb * 1e9))
    monkeypatch.setattr("pasta_decoding.engines.native.find_compiler", lambda: compiler)
    cache = tmp_path / "not" / "there"
    if there:
        (cache / there).mkdir(parents=True)
    assert default_adapter(cache, {}, config) == ("balanced" if lacks else LARGE)
    message = f"taking the small model: {LARGE} needs {lacks.format(cache)}"
    assert caplog.messages == ([message] if lacks else [])
    assert default_adapter(cache, {"PASTA_ADAPTER": "mine"}, config) == "mine"


def test_too_little_memory_is_reported_before_loading(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(PastaError, match=r"^the weights in .+ take 0\.0 GB, and 0\.0 GB of memory"):
        open_decoder(config_of(tiny_checkpoint), tmp_path)


def test_a_gguf_file_is_held_as_its_engine_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fast` holds formats that it does not pack in float32: `auto` prefers llama.cpp then."""
    file = tmp_path / "tiny.gguf"
    write_gguf(speaking(TINY_MODELS["llama"]()), file, float_type="F16")
    config = EngineConfig(model=file, adapter="none", device="cpu")
    files = find_files(config, tmp_path)
    tensors = files.gguf.tensors.values()
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    if "output.weight" in files.gguf.tensors:  # then embeddings are read row by row
        matrices.remove(files.gguf.tensors["token_embd.weight"])
    weights = sum(math.prod(matrix.shape) for matrix in matrices)
    monkeypatch.setattr(native, "find_compiler", lambda: "c++")
    monkeypatch.setattr(native, "load_operators", lambda _: "built")
    monkeypatch.setattr("pasta_decoding.engines.llama.load_library", lambda: None)
    assert native.held_bytes(files.gguf) == 2 * weights
    assert choose_engine(files) == "fast"
    monkeypatch.setattr(native, "_FLOATS", frozenset())  # as if F16 were not packed
    assert native.held_bytes(files.gguf) == 4 * weights
    assert choose_engine(files) == "llama"
    free = SimpleNamespace(available=file.stat().st_size + weights)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(PastaError, match=r"^the weights in .+ take 0\.0 GB, and"):
        open_decoder(replace(config, engine="fast"), tmp_path)


# Settings


def test_the_defaults_of_a_config_are_those_of_the_decoder() -> None:
    config = GenerationConfig()
    assert (config.rules, config.sampling()) == (Rules(), SamplingParams())
    assert Settings().answer_tokens == config.max_tokens


def test_a_value_that_means_nothing_is_refused_with_the_name_of_its_field() -> None:
    cases: list[tuple[Any, str, list[Any]]] = [
        (GenerationConfig, "max_tokens", [0, None, "5", 2.5, True]),
        (GenerationConfig, "max_threads", [0, True]),
        (GenerationConfig, "max_seconds", [-1.0, "3", float("nan")]),
        (GenerationConfig, "temperature", [-0.1, 101, None, float("nan")]),
        (GenerationConfig, "top_p", [0, 1.5]),
        (GenerationConfig, "top_k", [0, 2.5]),
        (GenerationConfig, "min_p", [1.5, -0.1]),
        (GenerationConfig, "repetition_penalty", [0, 1e-40, 2.1]),
        (GenerationConfig, "presence_penalty", [3, "1"]),
        (GenerationConfig, "frequency_penalty", [float("nan")]),
        (GenerationConfig, "logit_bias", [{3: 200}, {"a": 1}, {3: "x"}, [3]]),
        (GenerationConfig, "seed", [-1, None, 0.5]),
        (GenerationConfig, "stop", ["", ["a", ""], [1], 3]),
        (GenerationConfig, "parallel", ["yes", 1, None]),
        (GenerationConfig, "eagerness", [1000, "much", float("nan")]),
        (EngineConfig, "dtype", ["F17", None]),
        (EngineConfig, "join", ["kw"]),
        (EngineConfig, "max_model_len", [0, "8k"]),
        (EngineConfig, "cache_tokens", [-1, None]),
        (EngineConfig, "threads", [0]),
    ]
    for config_type, field, values in cases:
        for value in values:
            with pytest.raises(PastaError) as caught:
                config_type(**{field: value})
            assert caught.value.field == field


def test_values_of_other_forms_mean_the_same() -> None:
    assert GenerationConfig(logit_bias={"65": 1.0}, stop="a") == GenerationConfig(
        logit_bias={65: 1.0}, stop=["a"]
    )
    nothing: dict[str, Any] = {"stop": None, "logit_bias": None, "top_k": None, "max_seconds": None}
    assert GenerationConfig().updated(**nothing) == GenerationConfig()
    settings: Any = {"model": "org/base", "base_url": "http://localhost/v1", "join": "kv"}
    assert EngineConfig(**settings) == EngineConfig(
        model=Path("org/base"), base_url=("http://localhost/v1",), join=Joining.kv
    )
