"""Count the project and fail over a limit of `[tool.pasta.budget]` in `pyproject.toml`.

A limit is lowered (`--lower`) when there is room, and raised only with a sentence in the commit.
`pasta run` is counted by what has been imported when a tiny random checkpoint has answered.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
CORE = (
    "src/pasta_decoding/lang",
    "src/pasta_decoding/runtime",
    "src/pasta_decoding/engines/base.py",
)


def files(*where: str, kinds: str = "py") -> list[Path]:
    """Return the tracked files of these kinds."""
    listed = subprocess.check_output(["git", "ls-files", "-z", *where], cwd=ROOT, text=True)
    found = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in found if path.suffix[1:] in kinds.split() and path.is_file()]


def lines(*where: str, kinds: str = "py") -> int:
    """Count the lines of these files."""
    return sum(path.read_bytes().count(b"\n") for path in files(*where, kinds=kinds))


def commands(command: Any) -> Iterator[Any]:
    """Yield the commands below a group that do something."""
    for one in getattr(command, "commands", {}).values():
        yield from commands(one) if hasattr(one, "commands") else [one]


def options() -> dict[str, int]:
    """Count all commands, and the options of all of them together (arguments and --help aside)."""
    from typer.main import get_command

    from pasta_decoding.cli import make_app

    found = list(commands(get_command(make_app())))
    parameters = [one for command in found for one in command.params]
    named = [one for one in parameters if one.param_type_name == "option"]
    return {"commands": len(found), "options": len(named)}


def modules(run: Callable[[], object]) -> int:
    """Count the modules of the package that `run` imports, beginning with none."""
    for name in _ours():
        del sys.modules[name]
    with redirect_stdout(StringIO()):
        run()
    return len(_ours())


def _ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "pasta_decoding"]


def pasta(*arguments: str) -> None:
    """Run a command in this process."""
    from pasta_decoding.cli import main

    if main(arguments):
        raise SystemExit(f"pasta {' '.join(arguments)} failed")


def modules_of_run() -> int:
    """Count those of `pasta run`, on a tiny random checkpoint."""
    from tests.checkpoint import make_checkpoint

    with TemporaryDirectory() as folder:
        tiny = make_checkpoint(Path(folder))
        where = ["--model", str(tiny.base), "--adapter", str(tiny.adapter), "--engine", "torch"]
        return modules(lambda: pasta("run", *where, "--max-tokens", "4", "Hello"))


def counts() -> dict[str, int]:
    """Return every count, by the name of its limit."""
    return {
        "source_lines": lines("src", kinds="py cpp h html css js"),
        "source_files": len(files("src")),
        "core_lines": lines(*CORE),
        "test_lines": lines("tests"),
        "bench_and_script_lines": lines("bench", "scripts", kinds="py sh"),
        **options(),
        "modules_of_help": modules(lambda: pasta("--help")),
        "modules_of_run": modules_of_run(),
        "readme_lines": lines("README.md", kinds="md"),
        "docs_words": sum(len(path.read_text().split()) for path in files("docs", kinds="md")),
    }


def lowered(text: str, found: dict[str, int]) -> str:
    """Return `pyproject.toml` with each limit lowered to its count and a hundredth more."""
    for name, count in found.items():
        limit = re.search(rf"^{name} = (\d+)$", text, re.M)
        assert limit, f"{name} has a limit"
        text = text.replace(limit[0], f"{name} = {min(int(limit[1]), count + count // 100)}")
    return text


def main() -> int:
    """Print the table; return 1 if a count is over its limit. `--lower` lowers limits instead."""
    project = ROOT / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    limits = tomllib.loads(text)["tool"]["pasta"]["budget"]
    found = counts()
    for name, count in found.items():
        over = "  over its limit" if count > limits[name] else ""
        print(f"{name:24}{count:8}  of {limits[name]:6}{over}")
    if "--lower" in sys.argv:
        project.write_text(lowered(text, found), encoding="utf-8")
        return 0
    return int(any(count > limits[name] for name, count in found.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
