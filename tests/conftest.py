"""What all tests share: the hypothesis profile, and the default model where it is present."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from pasta_decoding.errors import PastaError
from pasta_decoding.models.bases import default_cache, model_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tests.checkpoint import TinyCheckpoint

# No test may depend on a hub, and tokenizers warn when a test forks a process.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor on the size of the machine, which chooses the adapter that commands take.
os.environ["PASTA_ADAPTER"] = "balanced"
# Nor on other programs, which a line of the log tells of.
os.getloadavg = lambda: (0.0, 0.0, 0.0)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A tiny model's threads wait for each other far longer than they work: with two of them the same
# tests take five times the processor time, and more where the machine has other work to do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models make examples slow, and a red run of `make` must be repeatable. By hand, examples are new
# each time. tests/examples.py is for laws whose examples cost more.
settings.register_profile("local", deadline=None)
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=400)
settings.load_profile("local")


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder that all processes of this run share; the environment tells them."""
    if "PASTA_TEST_RUN" not in os.environ:
        folder = TemporaryDirectory(prefix="pasta-tests-")
        os.environ["PASTA_TEST_RUN"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that hold slow tests, so that none of them is the last one, alone.

    Slow tests and the law take twice as long while lines are counted; the others reach every line.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    files = {item.path for item in slow}
    items.sort(key=lambda item: item.path not in files)
    for item in (*slow, *(item for item in items if item.path.parent.name == "law")):
        item.add_marker("no_cover")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("llama"):
        pytest.importorskip("llama_cpp", reason="needs the extra `llama`")
    if item.get_closest_marker("remote") and not os.environ.get("VLLM"):
        pytest.skip("needs vLLM: run `make test-vllm`, or let VLLM name its command")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device and a CUDA build of torch")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the default model; the test is skipped where there is none."""
    try:
        return model_path(default_cache(os.environ))
    except PastaError as error:
        pytest.skip(f"{error}: {error.hint}")


@pytest.fixture(scope="session")
def default_tokenizer(default_model: Path) -> PreTrainedTokenizerBase:
    """Return the default model's tokenizer. Shared: do not change it."""
    from pasta_decoding.models.pretrained import load_tokenizer

    tokenizer: PreTrainedTokenizerBase = load_tokenizer(default_model)
    return tokenizer


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Return the folders of a tiny base model and its adapter. Shared: do not change them."""
    from tests.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
