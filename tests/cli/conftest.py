"""Running commands in this process, on a tiny model."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pasta_decoding.cli import main
from pasta_decoding.engines.llama import load_library
from tests.checkpoint import TinyCheckpoint, keep_base


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object that `--json` promises."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def complaint(self) -> tuple[int, str, str]:
        """Status, the error's line and the hint's line, of a command that could not run."""
        message, _, hint = self.err.rstrip("\n").rpartition("\n")
        return self.status, message, hint


Pasta = Callable[..., Outcome]


def interrupted(*_arguments: Any, **_settings: Any) -> NoReturn:
    """Ctrl-C, wherever this stands in for something."""
    raise KeyboardInterrupt


@pytest.fixture
def pasta(capsys: pytest.CaptureFixture[str]) -> Pasta:
    """Return a function that runs `pasta` with the arguments given."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run


@pytest.fixture(autouse=True)
def without_llama(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Tests see the same engine whether the extra is installed or not, unless they are about it."""
    if request.node.get_closest_marker("llama"):
        yield
        return
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Return a function that puts bytes onto standard input."""

    def put(contents: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(contents)))

    return put


@pytest.fixture(scope="session")
def pulled(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache in which the tiny model stands for the default one."""
    cache = tmp_path_factory.mktemp("cache")
    keep_base(tiny_checkpoint.base, cache)
    return cache


@pytest.fixture
def tiny_cache(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let commands find the tiny model where the default one would be."""
    monkeypatch.setenv("PASTA_CACHE", str(pulled))
    return pulled
