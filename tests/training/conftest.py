"""What the tests of both stages share: one finished run of stage 1."""

from pathlib import Path

import pytest

from tests.checkpoint import TinyCheckpoint
from tests.training.tiny_runs import train


@pytest.fixture(scope="session")
def finished(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without a break. Shared: do not change it."""
    out = tmp_path_factory.mktemp("sft") / "out"
    train(tiny_checkpoint.base, out)
    return out
