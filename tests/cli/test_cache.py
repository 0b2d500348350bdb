"""`pasta cache`: what is there, and what goes; nothing that is not ours is touched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with a model, two exports, scratch folders old and new, and foreign files."""
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    sizes = {
        "smollm2-135m/manifest.json": 1000,
        "smollm2-135m/model.safetensors": 3_000_000,
        "gguf/a-F16.gguf": 2_000_000,
        "gguf/b-Q4_0.gguf": 500_000,
        "compiled/a-bfloat16-2.pt2": 400_000,
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


def test_the_list_names_what_is_ours_by_size(cache: Path, pasta: Pasta) -> None:
    found = pasta("cache", "list")
    rows = [line.split() for line in found.out.splitlines()]
    assert [(row[0], row[-2], row[-1]) for row in rows] == [
        ("3.0", "model", "smollm2-135m"),
        ("2.0", "export", "gguf/a-F16.gguf"),
        ("0.5", "export", "gguf/b-Q4_0.gguf"),
        ("0.4", "compiled", "compiled/a-bfloat16-2.pt2"),
        ("0.2", "scratch", ".pull-new"),
        ("0.1", "scratch", "gguf/.export-old"),
    ]
    assert found.err == f"6.2 MB in {cache}\n"


def test_what_is_told_of_a_compiled_model_goes_with_it(cache: Path, pasta: Pasta) -> None:
    for kind in ("json", "lock"):
        (cache / f"compiled/a-bfloat16-2.{kind}").write_text("{}")
    assert pasta("cache", "clean", "--all").status == 0
    assert list((cache / "compiled").iterdir()) == []


def test_cleaning_removes_exports_and_what_broke_off_long_ago(cache: Path, pasta: Pasta) -> None:
    found = pasta("cache", "clean")
    assert found.out.split() == ["gguf/a-F16.gguf", "gguf/b-Q4_0.gguf", "gguf/.export-old"]
    assert found.err == "2.6 MB freed\n"
    left = {path.name for path in cache.rglob("*") if path.is_file()}
    assert left == {
        "manifest.json",
        "model.safetensors",
        "fetched",
        "cat.png",
        "notes.txt",
        "a-bfloat16-2.pt2",
    }


def test_one_thing_may_be_named_and_all_of_ours_may_go(cache: Path, pasta: Pasta) -> None:
    assert pasta("cache", "clean", "gguf/b-Q4_0.gguf").out == "gguf/b-Q4_0.gguf\n"
    assert (cache / "gguf/a-F16.gguf").exists()
    assert pasta("cache", "clean", "--all").status == 0
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {"cat.png", "notes.txt"}
    assert pasta("cache", "list").out == ""


@pytest.mark.parametrize("name", ["notes.txt", "../x", "gguf/none.gguf"])
def test_what_is_not_in_the_list_is_not_removed(name: str, cache: Path, pasta: Pasta) -> None:
    expected = (2, f"pasta: the cache holds no {name}", "See `pasta cache list`.")
    assert pasta("cache", "clean", "gguf/a-F16.gguf", name).complaint == expected
    assert (cache / "gguf/a-F16.gguf").exists()


def test_names_and_all_contradict_each_other(cache: Path, pasta: Pasta) -> None:
    status, message, _ = pasta("cache", "clean", "notes.txt", "--all").complaint
    assert (status, message) == (2, "pasta: --all removes everything")
    assert len(list(cache.rglob("*.gguf"))) == 2


def test_an_empty_cache_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pasta: Pasta
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "none"))
    assert pasta("cache", "list").status == 0
    assert pasta("cache", "clean").err == "0.0 MB freed\n"
