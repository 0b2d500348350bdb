"""Every script of examples/ runs, on a tiny checkpoint in the place of the default model."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pasta_decoding as pasta
from tests.checkpoint import TinyCheckpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return a function that runs a script on the tiny checkpoint and returns its output."""
    load = pasta.load

    def load_tiny(name: str, *, model: str | None = None, engine: str = "torch") -> pasta.Model:
        assert name
        return load(tiny_checkpoint.adapter, model=model or tiny_checkpoint.base, engine=engine)

    monkeypatch.setattr(pasta, "load", load_tiny, raising=False)

    def script(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_an_example_shows_what_it_is_about(run: Run) -> None:
    assert "steps" in run("answer.py")
    assert "] promised: " in run("stream_threads.py")
    assert "Who wrote Hamlet?" in run("batch_measures.py")


def test_a_checkpoint_of_ones_own_is_compared_with_its_base_model(
    run: Run, tiny_checkpoint: TinyCheckpoint
) -> None:
    output = run("own_checkpoint.py", tiny_checkpoint.adapter, "--model", tiny_checkpoint.base)
    assert output.index("parallel: ") < output.index("base model: ")


def test_every_example_is_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*.py"):
        assert f"`{script.name}`" in listed
        assert f'"{script.name}"' in here
