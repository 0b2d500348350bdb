"""What an installation brings: every import is declared, and the wheel holds what it needs."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pasta_decoding.errors import install_command
from pasta_decoding.models.bases import BASES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_TYPES = {"_typeshed"}
HOSTS = {"vllm", "triton"}  # they load what imports them, or torch brings them
# Whoever only decodes, lints or serves does without these; pip brings them with `train`.
NOT_NEEDED = ("peft", "accelerate", "matplotlib")


def imported() -> set[str]:
    """The top-level names that the package imports, wherever it does."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - FOR_TYPES - HOSTS - {"pasta_decoding"}


def declared() -> dict[str, Requirement]:
    """All requirements, extras and all, by their normal names."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = [Requirement(line) for one in lists for line in one]
    return {canonicalize_name(one.name): one for one in every}


def test_every_imported_package_is_declared() -> None:
    packages = importlib.metadata.packages_distributions()
    ships = {"llama_cpp": ["llama-cpp-python"]}
    # pydantic and pydantic_core come and go together.
    ships["pydantic_core"] = ["pydantic"]
    missing = {
        name
        for name in imported()
        if not {canonicalize_name(d) for d in ships.get(name) or packages.get(name, [name])}
        & declared().keys()
    }
    assert missing == set()


def test_decoding_does_not_ask_for_what_only_training_needs() -> None:
    base = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert base.isdisjoint(NOT_NEEDED)


def test_an_extra_is_installed_from_the_checkout_or_from_the_index(tmp_path: Path) -> None:
    module = tmp_path / "src" / "pasta_decoding" / "errors.py"
    assert install_command("llama", module) == 'pip install "pasta-decoding[llama]"'
    (tmp_path / "pyproject.toml").touch()
    assert install_command("llama", module) == f'pip install -e "{tmp_path}[llama]"'


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_default_adapters_and_their_licence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-w", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    adapters = {name.split("/")[2] for name in names if name.startswith("pasta_decoding/adapters/")}
    bases = [one for base in BASES.values() for one in (base.adapter, base.baseline)]
    assert adapters == {"LICENSE.md", *bases}
    assert wheel.stat().st_size < 60e6
    [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0\n" in text
    kept = ("server/page.html", "evaluation/report.html", "engines/linear.cpp")
    assert {f"pasta_decoding/{name}" for name in kept} <= {*names}
