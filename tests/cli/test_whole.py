"""A model that is base and adapter in one: named either way, never beside another."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta

FLOAT32 = ("--engine", "torch", "--dtype", "float32")
PROMPT = ("run", "Hello", "--max-tokens", "48", "--json", *FLOAT32)


@pytest.fixture(scope="module")
def merged(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "merged"
    export_hf(load_model(tiny_checkpoint.base, tiny_checkpoint.adapter), folder)
    return folder


def annotated(outcome: Outcome) -> str:
    return str(outcome.object["annotated"])


def test_a_merged_folder_is_a_model_and_an_adapter_alike(
    pasta: Pasta, merged: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    parts = ("--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter)
    expected = annotated(pasta(*PROMPT, *parts))
    assert annotated(pasta(*PROMPT, "--model", merged)) == expected
    assert annotated(pasta(*PROMPT, "--adapter", merged)) == expected


@pytest.mark.parametrize("adapter", ["balanced", "none", "other.gguf"])
def test_an_adapter_is_never_put_on_a_merged_folder(
    adapter: str, pasta: Pasta, merged: Path
) -> None:
    found = pasta(*PROMPT, "--model", merged, "--adapter", adapter)
    assert found.complaint == (
        2,
        f"pasta: {merged} is a whole model, adapter and all",
        "Name it as --model or as --adapter, and leave the other out.",
    )


@pytest.mark.parametrize("name", ["file.gguf", "merged"])
def test_a_base_is_never_put_under_a_whole_model(
    name: str, pasta: Pasta, merged: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    whole = merged if name == "merged" else merged.parent / name
    found = pasta(*PROMPT, "--model", tiny_checkpoint.base, "--adapter", whole)
    assert found.complaint[:2] == (2, f"pasta: {whole} is a whole model, adapter and all")
