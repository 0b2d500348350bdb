"""The product does what it did: golden files, taken from commit d8d9fc2, stay equal in value."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pasta_decoding as pasta
from tests.golden import golden

RENEW = "If this change is meant: python -m tests.golden.golden"
NAMES = ("parallel", "sequential")
QUICK = (0, 8, 12, 19)
"""The prompts that are answered by default: those with the fewest steps; the others are `slow`."""


@pytest.fixture(scope="module")
def torch_model(default_model: Path) -> Iterator[pasta.Model]:
    with pasta.load("balanced", model=default_model, **golden.ENGINES["torch"]) as model:
        yield model


@pytest.fixture(scope="module")
def llama_model(default_model: Path) -> Iterator[pasta.Model]:
    with pasta.load("balanced", model=default_model, **golden.ENGINES["llama"]) as model:
        yield model


def hold(model: pasta.Model, entry: dict[str, Any], name: str, engine: str) -> None:
    """Compare one answer; where two tokens were nearly as likely, another machine may differ."""
    expected = entry[name]
    found = golden.answer(model, entry["prompt"], parallel=name == "parallel")
    least_gap = expected.pop("least_gap")
    if found != expected and least_gap < golden.NEAR_TIE[engine]:
        pytest.skip(f"differs, and two logits were {least_gap} apart")
    assert found == expected


def entries(engine: str) -> list[Any]:
    """The answers as cases; all but the quick ones are marked `slow`."""
    return [
        pytest.param(
            entry,
            name,
            id=f"{number}-{name}",
            marks=[] if number in QUICK and name == "parallel" else pytest.mark.slow,
        )
        for number, entry in enumerate(golden.read(engine))
        for name in NAMES
        if name in entry
    ]


@pytest.mark.parametrize("number", QUICK)
def test_answers_on_torch(number: int, torch_model: pasta.Model) -> None:
    hold(torch_model, golden.read("torch")[number], "parallel", "torch")


@pytest.mark.slow
def test_all_answers_on_torch_side_by_side(torch_model: pasta.Model) -> None:
    """One after the other they take many times as long."""
    cases = [(entry, name) for entry in golden.read("torch") for name in NAMES]

    def answer(case: tuple[dict[str, Any], str]) -> dict[str, Any]:
        entry, name = case
        return golden.answer(torch_model, entry["prompt"], parallel=name == "parallel")

    with ThreadPoolExecutor(len(cases)) as clients:
        found = list(clients.map(answer, cases))
    for (entry, name), one in zip(cases, found, strict=True):
        expected = entry[name]
        near = expected.pop("least_gap") < golden.NEAR_TIE["torch"]
        assert near or one == expected, (entry["prompt"], name)


@pytest.mark.llama
@pytest.mark.parametrize(("entry", "name"), entries("llama"))
def test_answers_on_llama(entry: dict[str, Any], name: str, llama_model: pasta.Model) -> None:
    hold(llama_model, entry, name, "llama")


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_run_prints_the_same_json() -> None:
    assert golden.run_json() == golden.read("run")


def test_the_schema_of_the_server() -> None:
    expected, found = golden.read("openapi"), golden.openapi()
    gone = [f"- {path}: {value}" for path, value in expected.items() if found.get(path) != value]
    new = [f"+ {path}: {value}" for path, value in found.items() if expected.get(path) != value]
    assert gone + new == [], "\n".join([*gone[:20], *new[:20], f"{RENEW} openapi"])


def test_losses_of_both_stages() -> None:
    expected, found = golden.read("losses"), golden.losses()
    for stage, lines in expected.items():
        assert found[stage] == [pytest.approx(line, rel=1e-4, abs=1e-3) for line in lines], stage
