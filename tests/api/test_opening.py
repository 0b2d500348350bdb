"""Which engine opens a checkpoint, and what it says on the way."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import choose_engine, find, open_decoder
from pasta_decoding.engines.llama import library
from pasta_decoding.errors import PastaError
from tests.checkpoint import TinyCheckpoint


def config_of(tiny: TinyCheckpoint, **settings: object) -> EngineConfig:
    named = {"model": tiny.base, "adapter": tiny.adapter, "device": "cpu"} | settings
    return EngineConfig.named(**named)


@pytest.mark.parametrize(("compiler", "taken"), [("/usr/bin/c++", "fast"), (None, "torch")])
def test_without_llama_auto_takes_fast_or_torch(
    compiler: str | None,
    taken: str,
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    library.cache_clear()
    monkeypatch.setattr("pasta_decoding.engines.native.find_compiler", lambda: compiler)
    assert choose_engine(find(config_of(tiny_checkpoint), Path())) == taken
    library.cache_clear()


@pytest.mark.llama
def test_with_llama_auto_takes_it_where_it_can_and_exports_once(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_checkpoint, threads=1, cache_tokens=512)
    with caplog.at_level("INFO", "pasta_decoding"):
        first, again = (open_decoder(config, tmp_path) for _ in range(2))
    assert first.name == again.name == "llama F16"
    assert sum("(once)" in one.getMessage() for one in caplog.records) == 1
    assert [path.suffix for path in (tmp_path / "gguf").iterdir()] == [".gguf"]
    folder = shutil.copytree(tiny_checkpoint.adapter, tmp_path / "adapter")
    record = json.loads((folder / "pasta.json").read_text()) | {"scheme": "reserve"}
    (folder / "pasta.json").write_text(json.dumps(record))
    reserve = config_of(tiny_checkpoint, adapter=folder)
    assert choose_engine(find(reserve, tmp_path)) in ("fast", "torch")
    with pytest.raises(PastaError, match="cannot take the positions of the scheme 'reserve'"):
        open_decoder(config_of(tiny_checkpoint, adapter=folder, engine="llama"), tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 10_000}, "max_model_len is 10000, and model and cache hold"),
        ({"cache_tokens": 10**12}, "a cache of 1000000000000 tokens takes"),
        ({"model": "any.gguf", "adapter": None}, "the torch engine does not read GGUF files"),
        ({"dtype": "Q4_0"}, "the torch engine has no number format Q4_0"),
        ({"device": "cuda:7"}, "cannot put the model on the device"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    settings: dict[str, object], said: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    with pytest.raises(PastaError, match=said):
        open_decoder(config_of(tiny_checkpoint, engine="torch", **settings), Path())
