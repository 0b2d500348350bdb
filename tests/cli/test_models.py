"""`pasta models` and `pasta pull`: what is there, what goes, and nothing that is not ours."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta, interrupted

OURS = [
    ["3.0", "MB", "model", "smollm2-135m"],
    ["2.0", "MB", "export", "gguf/a-F16.gguf"],
    ["0.5", "MB", "export", "gguf/b-Q4_0.gguf"],
    ["0.2", "MB", "scratch", ".pull-new"],
    ["0.1", "MB", "scratch", "gguf/.export-old"],
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with a model, two exports, scratch folders old and new, and foreign files."""
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    sizes = {
        "smollm2-135m/manifest.json": 1000,
        "smollm2-135m/model.safetensors": 3_000_000,
        "gguf/a-F16.gguf": 2_000_000,
        "gguf/b-Q4_0.gguf": 500_000,
        "gguf/.export-old/a.f32": 100_000,
        ".pull-new/fetched": 200_000,
        "photos/cat.png": 10,
        "notes.txt": 10,
    }
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    old_s = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / "gguf/.export-old/a.f32", (old_s, old_s))
    return tmp_path


def test_the_list_names_bases_adapters_and_what_is_ours_by_size(cache: Path, pasta: Pasta) -> None:
    found = pasta("models")
    rows = [line.split() for line in found.out.splitlines()]
    assert [row for row in rows if row[2] not in ("base", "adapter")] == OURS
    named = [row[3] for row in rows if row[2] in ("base", "adapter")]
    assert {"smollm2-135m", "balanced", "sequential"} <= set(named)
    assert found.err == f"5.8 MB in {cache}\n"


def test_clean_removes_what_is_made_again_and_what_is_named(cache: Path, pasta: Pasta) -> None:
    found = pasta("models", "--clean", "gguf/b-Q4_0.gguf")
    assert (found.status, found.err) == (0, "0.5 MB freed\n")
    assert not (cache / "gguf/b-Q4_0.gguf").exists()
    assert pasta("models", "--clean").err == "2.1 MB freed\n"
    left = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    assert left == {
        "smollm2-135m/manifest.json",
        "smollm2-135m/model.safetensors",
        ".pull-new/fetched",
        "photos/cat.png",
        "notes.txt",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models", "--clean", "notes.txt"], "the cache holds no notes.txt"),
        (["models", "gguf/a-F16.gguf"], "names are for --clean"),
        (["pull", "llama"], "no model 'llama'"),
        (["export", "balanzed", "--out", "x"], "no adapter 'balanzed'"),
        (["export", "balanced", "--out", "x", "--dtype", "F17"], "no dtype 'F17'"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_mistake_is_one_line(arguments: list[str], said: str, pasta: Pasta) -> None:
    found = pasta(*arguments)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {said}")


def test_pull_keeps_a_sound_model_and_prints_its_folder(tiny_cache: Path, pasta: Pasta) -> None:
    found = pasta("pull")
    assert (found.status, found.out) == (0, f"{tiny_cache / 'smollm2-135m'}\n")


def test_an_interrupted_pull_is_status_130(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", interrupted)
    assert pasta("pull", "--source", "hub").status == 130
