"""What an installation brings: every import is declared."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pasta_decoding.errors import install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOSTS = {"vllm", "triton", "_typeshed"}  # they load what imports them, or others bring them
# Whoever only decodes, lints or serves does without these; pip brings them with `train`.
NOT_NEEDED = ("peft", "accelerate", "matplotlib")


def imported() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - HOSTS - {"pasta_decoding"}


def declared() -> dict[str, Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = [Requirement(line) for one in lists for line in one]
    return {canonicalize_name(one.name): one for one in every}


def test_every_imported_package_is_declared() -> None:
    packages = importlib.metadata.packages_distributions()
    ships = {"llama_cpp": ["llama-cpp-python"], "pydantic_core": ["pydantic"]}
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


def test_the_adapters_of_a_wheel_stay_small() -> None:
    assert sum(one.stat().st_size for one in (ROOT / "adapters").rglob("*.*")) < 60_000_000
